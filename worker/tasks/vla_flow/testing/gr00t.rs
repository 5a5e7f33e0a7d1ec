//! The golden policy of type `groot`, which names the directory of its base.

use std::{fs, path::Path};

use serde_json::{Value, json};
use tempfile::TempDir;

/// The golden case.
pub const GR00T: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden/gr00t-widowx");

/// A directory of it, and its base, which drops so much.
pub fn policy(dropout: f64) -> TempDir {
    let (golden, dir) = (Path::new(GR00T), tempfile::tempdir().expect("a directory for the test"));
    for file in fs::read_dir(golden.join("policy")).expect("there") {
        let path = file.expect("listed").path();
        fs::copy(&path, dir.path().join(path.file_name().expect("a file"))).expect("copied");
    }
    let base = dir.path().join("base");
    fs::create_dir(&base).expect("made");
    edited(&golden.join("base/config.json"), &base.join("config.json"), |config| {
        config["state_dropout_prob"] = json!(dropout);
        for section in ["diffusion_model_cfg", "vl_self_attention_cfg"] {
            config[section]["dropout"] = json!(dropout);
        }
    });
    edited(&golden.join("policy/config.json"), &dir.path().join("config.json"), |config| {
        config["base_model_path"] = json!(base);
    });
    dir
}

fn edited(from: &Path, to: &Path, change: impl Fn(&mut Value)) {
    let mut json: Value = serde_json::from_slice(&fs::read(from).expect("there")).expect("JSON");
    change(&mut json);
    fs::write(to, json.to_string()).expect("written");
}
