"""What this machine reaches, measured through the backend that training uses (ATP §5.3)."""
