"""Checks that a checkpoint computes on this machine what its authors meant (`moejax verify`)."""
