"""A narrow, useful job that the bundled model cannot do: a schedule in words becomes a crontab line."""
