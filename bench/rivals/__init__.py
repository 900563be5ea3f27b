"""What trainers do without maskpack, by what it stands against."""
