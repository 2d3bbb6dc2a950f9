"""What a run consists of, as data: parameters, layout, mesh, stages, schedules, batch. No torch."""
