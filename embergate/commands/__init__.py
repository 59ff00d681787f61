"""The commands, one module each. They decode arguments, call, and print; they decide nothing."""
