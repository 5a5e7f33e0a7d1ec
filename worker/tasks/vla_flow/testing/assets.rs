//! Models and data sets that ship with the repository, and a run of them.

use std::path::{Path, PathBuf};

use coxswain_proto::run_spec::RunSpec;

/// Models and data sets that ship with the repository.
pub fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/assets")
}

/// A run on the data set at `data` with the checkpoint that ships with the repository.
pub fn spec(data: &Path) -> RunSpec {
    let json = serde_json::json!({
        "run": {"name": "t", "output_dir": "unused", "seed": 5},
        "model": {"path": assets().join("tiny-vla")},
        "data": {
            "path": data, "cameras": ["observation.images.corner2"], "sensor": "observation.sensor",
            "horizon": 8, "holdout_episodes": [2],
        },
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 2},
    });
    serde_json::from_value(json).expect("a valid spec")
}

/// A data set that the lerobot package wrote.
pub fn mini() -> PathBuf {
    assets().join("metaworld-mini")
}
