//! Where the directory of a model is that a policy names by its hub name alone: configuration, tokenizer
//! and processor, which a policy's directory does not hold.
//!
//! ```text
//! model.backbone: DIR                                    that directory
//! else Hugging Face's cache, under the name that the policy has for it
//! ```

use std::path::{Path, PathBuf};

use coxswain_data::place::hub;
use coxswain_models::pretrained::error::ModelError;

/// Without which a directory is no model.
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];

/// Where a policy names its model.
#[derive(Clone, Copy, Debug)]
pub struct NamedIn<'n> {
    /// The file.
    pub path: &'n Path,
    /// The field.
    pub field: &'n str,
    /// The name on the hub.
    pub repository: &'n str,
}

/// The directory of the model that a policy names: `given`, else that of Hugging Face's cache.
///
/// # Errors
///
/// One that names the file that is missing, the repository and the command that brings it.
pub fn find(given: Option<&Path>, named: NamedIn<'_>) -> Result<PathBuf, ModelError> {
    let NamedIn { path, field, repository } = named;
    let refuse = |problem: String| ModelError::Config { path: path.into(), field: field.into(), problem };
    let missing = |dir: &Path| NEEDED.into_iter().find(|file| !dir.join(file).is_file());
    let command = format!("`hf download {repository} --include '*.json'`");
    if let Some(dir) = given {
        return match missing(dir) {
            None => Ok(dir.into()),
            Some(file) => Err(refuse(format!(
                "{repository:?}: `model.backbone` is {}, which has no {file}; copy it there, or remove `model.backbone` and run {command}",
                dir.display()
            ))),
        };
    }
    if Path::new(repository).is_dir() && missing(Path::new(repository)).is_none() {
        return Ok(repository.into());
    }
    let (found, Some(cache)) = hub::model(repository) else {
        return Err(refuse(format!(
            "{repository:?}, but HOME is not set, so the Hugging Face cache is unknown; set `model.backbone`"
        )));
    };
    match found.as_deref().map(|dir| (dir, missing(dir))) {
        Some((dir, None)) => Ok(dir.into()),
        Some((dir, Some(file))) => Err(refuse(format!(
            "{repository:?}, but {} has no {file}; {command} downloads it",
            dir.display()
        ))),
        None => Err(refuse(format!(
            "{repository:?}: no {} of this model in the cache {}; run {command}, or \
             set `model.backbone` to the model's directory",
            NEEDED[0],
            cache.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_is_missing_is_told_with_file_repository_and_command() {
        let empty = tempfile::tempdir().expect("a directory for the test");
        let path = "P/config.json".as_ref();
        let named = NamedIn { path, field: "vlm_model_name", repository: "owner/name" };
        let error = find(Some(empty.path()), named);
        let message = error.expect_err("it is empty").to_string();
        for part in
            ["P/config.json", "vlm_model_name", "owner/name", "no config.json", "hf download owner/name"]
        {
            assert!(message.contains(part), "{message}");
        }
        for file in NEEDED {
            fs::write(empty.path().join(file), "{}").expect("written");
        }
        let found = find(Some(empty.path()), named);
        assert_eq!(found.expect("it is there"), empty.path());
    }
}
