"""The command `tfpar`: plans made, shown and compared from a shell."""
