"""Commands that run grids of policies and budgets and report them."""
