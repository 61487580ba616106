"""What is shown and checked: reports, timelines, monitoring, verification."""
