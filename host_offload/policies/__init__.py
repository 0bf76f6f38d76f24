"""The policies that come with moejax, one file each."""
