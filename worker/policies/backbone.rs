//! Where the directory of a model is that a policy names by its hub name alone: configuration, tokenizer
//! and processor, which a policy's directory does not hold.
//!
//! ```text
//! model.backbone: DIR                                    that directory
//! else $HF_HUB_CACHE, or $HF_HOME/hub, or ~/.cache/huggingface/hub
//!        models--OWNER--NAME/refs/main                   names a snapshot
//!        models--OWNER--NAME/snapshots/REVISION/         links to blobs; read where they lie
//! ```

use std::{
    env, fs,
    path::{Path, PathBuf},
};

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
                "{repository:?}, for which `model.backbone` names {}, and there is no {file}; {command} brings it",
                dir.display()
            ))),
        };
    }
    if Path::new(repository).is_dir() && missing(Path::new(repository)).is_none() {
        return Ok(repository.into());
    }
    let Some(cache) = cache(|name| env::var_os(name).map(PathBuf::from)) else {
        return Err(refuse(format!(
            "{repository:?}, and there is no HOME to look below; set `model.backbone`"
        )));
    };
    let found = snapshot(&cache, repository);
    match found.as_deref().map(|dir| (dir, missing(dir))) {
        Some((dir, None)) => Ok(dir.into()),
        Some((dir, Some(file))) => {
            Err(refuse(format!("{repository:?}, and {} has no {file}; {command} brings it", dir.display())))
        }
        None => Err(refuse(format!(
            "{repository:?}, whose {} is not below {}; {command} brings it, or set `model.backbone` to a directory that has it",
            NEEDED[0],
            cache.display()
        ))),
    }
}

/// Hugging Face's cache, by the variables that its own library reads.
fn cache(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let home = || {
        Some(
            variable("XDG_CACHE_HOME")
                .or_else(|| Some(variable("HOME")?.join(".cache")))?
                .join("huggingface"),
        )
    };
    variable("HF_HUB_CACHE").or_else(|| Some(variable("HF_HOME").or_else(home)?.join("hub")))
}

/// The snapshot of a repository that its branch `main` was at when it was brought; else the only one.
fn snapshot(cache: &Path, repository: &str) -> Option<PathBuf> {
    let folder = cache.join(format!("models--{}", repository.replace('/', "--")));
    let snapshots = folder.join("snapshots");
    if let Ok(revision) = fs::read_to_string(folder.join("refs/main")) {
        let named = snapshots.join(revision.trim());
        if named.is_dir() {
            return Some(named);
        }
    }
    let mut there = fs::read_dir(snapshots).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let only = there.next()?;
    there.next().is_none().then_some(only)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_found_where_hugging_face_keeps_it() {
        let home = tempfile::tempdir().expect("a directory for the test");
        let of = |set: &'static str| cache(move |name| (name == set).then(|| PathBuf::from("/c")));
        assert_eq!(of("HF_HUB_CACHE"), Some("/c".into()));
        assert_eq!(of("HF_HOME"), Some("/c/hub".into()));
        assert_eq!(of("HOME"), Some("/c/.cache/huggingface/hub".into()));
        assert_eq!(of("OTHER"), None);
        let folder = home.path().join("models--owner--name");
        for revision in ["a", "b"] {
            fs::create_dir_all(folder.join("snapshots").join(revision)).expect("made");
        }
        assert_eq!(snapshot(home.path(), "owner/name"), None, "two, and none is named");
        fs::create_dir_all(folder.join("refs")).expect("made");
        fs::write(folder.join("refs/main"), "b\n").expect("written");
        assert_eq!(snapshot(home.path(), "owner/name"), Some(folder.join("snapshots/b")));
    }

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
