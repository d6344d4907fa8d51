"""What a process counts about itself, and how it is logged and rendered."""
