//! NVIDIA's own directory of the model, which says nothing of a robot, as the directory of a policy for one.
//!
//! What LeRobot 0.6.1 writes for a robot that the model does not know, whose base is named as on the hub:
//! cameras, state and action are the data set's, pictures are those of the published model. Statistics are
//! left to the run, which has the data set's. Weights stay where they are: the directory has links to them.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use coxswain_models::pretrained::{
    checkpoint::Checkpoint, config_file, error::ModelError, fields::Fields, merge::INDEX,
};
use serde_json::{Map, Value, json};

use super::{
    config::{MODEL_TYPE, check_base, number},
    names::RULES,
};
use crate::{
    directory::Feature,
    export::{Statistics, listed, unwritten, write_json, write_statistics},
};

/// What LeRobot's `make_groot_pre_post_processors` writes, by file: null is what a base or a robot decides.
const FILES: &str = include_str!("new_embodiment.json");

/// A base, and the robot that a policy is wanted for.
#[derive(Clone, Copy, Debug)]
pub struct BasePolicy<'b> {
    /// NVIDIA's directory.
    pub dir: &'b Path,
    /// What the policy is to call it: its name on the hub, or the directory.
    pub name: &'b str,
    /// Cameras and state.
    pub inputs: &'b [Feature],
    /// The action.
    pub outputs: &'b [Feature],
}

/// Whether `dir` is NVIDIA's own directory.
pub fn is_base(dir: &Path) -> bool {
    config_file::read(dir)
        .is_ok_and(|(_, json)| json.get("model_type").and_then(Value::as_str) == Some(MODEL_TYPE))
}

impl BasePolicy<'_> {
    /// Makes the policy's directory `out`, whole or not at all. It must not exist.
    pub fn write(self, out: &Path) -> Result<(), ModelError> {
        let (path, json) = config_file::read(self.dir)?;
        let base = Fields::new(&path, &json)?;
        check_base(&base)?;
        let weights = weights(self.dir)?;
        if out.symlink_metadata().is_ok() {
            let (path, source) = (out.to_owned(), io::ErrorKind::AlreadyExists.into());
            return Err(ModelError::Io { path, source, remedy: "remove it, or give --out another name" });
        }
        // A name that nobody else gives: what is left below it by a process that was killed is deleted.
        let name = out.file_name().unwrap_or_default().to_string_lossy();
        let staged = &out.with_file_name(format!(".{name}.cox-new"));
        let _ = fs::remove_dir_all(staged);
        fs::create_dir(staged).map_err(unwritten(staged))?;
        let written = self.files(&base).and_then(|files| {
            for (name, json) in &files {
                write_json(&staged.join(name), json)?;
                for step in json.get("steps").and_then(Value::as_array).into_iter().flatten() {
                    if let Some(state) = step.get("state_file").and_then(Value::as_str) {
                        write_statistics(&staged.join(state), &Statistics::new())?;
                    }
                }
            }
            for file in weights {
                let link = staged.join(file.file_name().unwrap_or_default());
                symlink(&file, &link).map_err(unwritten(&link))?;
            }
            fs::rename(staged, out).map_err(unwritten(out))
        });
        // The first error is the one to report.
        written.inspect_err(|_| drop(fs::remove_dir_all(staged)))
    }

    /// The policy's JSON files, by name.
    fn files(&self, base: &Fields<'_>) -> Result<Map<String, Value>, ModelError> {
        let mut files: Value = serde_json::from_str(FILES).expect("JSON, as its test reads it");
        let chunk = json!(number(base, "action_horizon", 40)?);
        let chunks = ["chunk_size", "n_action_steps", "action_horizon", "valid_action_horizon"];
        let decided = [
            ("base_model_path", json!(self.name)),
            ("input_features", listed(self.inputs)),
            ("output_features", listed(self.outputs)),
            ("max_state_dim", json!(number(base, "max_state_dim", 132)?)),
            ("max_action_dim", json!(number(base, "max_action_dim", 132)?)),
            ("env_action_dim", json!(self.outputs.iter().find_map(|feature| feature.shape.first()))),
        ];
        fill(&mut files, &decided.into_iter().chain(chunks.map(|key| (key, chunk.clone()))).collect());
        let Value::Object(files) = files else { unreachable!("it is an object, as its test reads it") };
        Ok(files)
    }
}

/// Gives every key that is null the value that was decided for it, if there is one.
fn fill(json: &mut Value, decided: &BTreeMap<&str, Value>) {
    match json {
        Value::Object(map) => map.iter_mut().for_each(|(key, value)| match decided.get(&**key) {
            Some(found) if value.is_null() => *value = found.clone(),
            _ => fill(value, decided),
        }),
        Value::Array(list) => list.iter_mut().for_each(|one| fill(one, decided)),
        _ => {}
    }
}

/// The files of weights and their index.
fn weights(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let checkpoint = Checkpoint::open(dir, RULES)?;
    let mut files: Vec<PathBuf> = checkpoint.files().map(Path::to_path_buf).collect();
    if files.len() > 1 {
        files.push(dir.join(INDEX));
    }
    // Links of a cache stay as they are: what they lead to has no name.
    files.into_iter().map(|file| std::path::absolute(&file).map_err(unwritten(&file))).collect()
}
