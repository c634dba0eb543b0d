"""What is trained, and the engines that train it: models, ways of splitting them, one training run from beginning to end."""
