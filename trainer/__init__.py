"""Training: config, learner, checkpoints, the driver, the asynchronous API and the command line."""
