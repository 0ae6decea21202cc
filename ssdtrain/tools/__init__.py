"""What stands during training: the command line, and what its commands do. No other
part of the package imports them."""
