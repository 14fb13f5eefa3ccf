"""The core of a run: units, budget, schedule, events, fold, phases, log and audit. No torch, no Ray."""
