"""What is wrong with a machine: facts read from the system, and pure checks that make findings with a fix of them."""
