"""Networks of users: sample inputs, runs without side effects, and checks before training."""
