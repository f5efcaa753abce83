"""Which machine should hold which layers: a pure planner, fed by `meshnet plan` or by a live fleet."""
