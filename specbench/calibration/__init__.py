"""From answers of the target to a calibration artefact, and where artefacts are found."""
