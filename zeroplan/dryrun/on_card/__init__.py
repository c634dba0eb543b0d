"""The same script on real GPUs: as one rank of N on one card, or under a launcher on all of them."""
