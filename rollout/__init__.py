"""Generation: tasks and rewards, engines, rollout workers and the group store."""
