"""What the audit says of a scenario, in the words that tests use."""

from __future__ import annotations

from surefoot.statemachine.audit import AuditReport, audit

from .scenario import Scenario


def report_of(scenario: Scenario) -> AuditReport:
    return audit(scenario.rows())


def failures(scenario: Scenario) -> dict[str, str]:
    """The checks that do not hold, with what they say."""
    report = report_of(scenario)
    failed = {check.id: check.detail for check in report.checks if not check.ok}
    assert report.ok == (not failed)
    return failed


def assert_only(scenario: Scenario, check: str, *words: str) -> None:
    """Just this check fails, and its detail has these words in it."""
    failed = failures(scenario)
    assert list(failed) == [check], failed
    for word in words:
        assert word in failed[check], failed[check]


def detail(report: AuditReport, check: str) -> str:
    return next(c.detail for c in report.checks if c.id == check)
