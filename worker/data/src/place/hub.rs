//! Where Hugging Face keeps what it has brought, so that a model or a data set may be named as on the hub.
//!
//! ```text
//! OWNER/NAME   a directory of that name, if there is one; else
//!   model      $HF_HUB_CACHE, or $HF_HOME/hub, or ~/.cache/huggingface/hub
//!   data set   $HF_LEROBOT_HOME (or $HF_HOME/lerobot) /OWNER/NAME, its hub/, and where models are
//!
//! models--OWNER--NAME/refs/main              names a snapshot
//! models--OWNER--NAME/snapshots/REVISION/    links to blobs; read where they lie
//! ```

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use coxswain_proto::human;

use crate::error::DataError;

/// What is kept under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repository {
    /// A model or a policy.
    Model,
    /// A data set of LeRobot's.
    Dataset,
}

/// The directory that `path` is, or that Hugging Face has brought under that name. Refuses a name under
/// which nothing is there, and a model's directory with nothing in it; what cannot be a name is left to who
/// reads it.
pub fn directory(path: &Path, repository: Repository) -> Result<PathBuf, DataError> {
    directory_by(path, repository, variable)
}

/// The snapshot of a model that Hugging Face's cache has, and the cache; no cache where no variable says
/// where it would be.
pub fn model(name: &str) -> (Option<PathBuf>, Option<PathBuf>) {
    let cache = cache(variable);
    (cache.as_deref().and_then(|cache| snapshot(cache, "models", name)), cache)
}

fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn directory_by(
    path: &Path,
    repository: Repository,
    variable: impl Fn(&str) -> Option<PathBuf>,
) -> Result<PathBuf, DataError> {
    let Some(name) = name_of(path).filter(|_| !path.exists()) else {
        let is_empty = fs::read_dir(path).is_ok_and(|mut files| files.next().is_none());
        if repository == Repository::Model && is_empty {
            let remedy = format!(
                "name another directory, or fill this one: `hf download OWNER/NAME --local-dir {}`",
                human::word(path.display())
            );
            return Err(DataError::invalid(path, "(directory)", "is empty", remedy));
        }
        return Ok(path.to_path_buf());
    };
    let cache = cache(&variable);
    let in_cache = |kind| cache.as_deref().and_then(|cache| snapshot(cache, kind, name));
    let (found, command) = match repository {
        Repository::Model => (in_cache("models"), format!("hf download {name}")),
        Repository::Dataset => {
            let home = variable("HF_LEROBOT_HOME").or_else(|| Some(home(&variable)?.join("lerobot")));
            let recorded = home.as_ref().map(|home| home.join(name)).filter(|dir| dir.is_dir());
            let brought = || snapshot(&home.as_ref()?.join("hub"), "datasets", name);
            let found = recorded.or_else(brought).or_else(|| in_cache("datasets"));
            (found, format!("hf download --repo-type dataset {name}"))
        }
    };
    found.ok_or_else(|| {
        let looked =
            cache.map_or_else(String::new, |cache| format!(", and {} has no {name}", cache.display()));
        DataError::Invalid {
            path: path.into(),
            field: "(directory)".into(),
            found: format!("there is no such directory{looked}"),
            remedy: format!(
                "name an existing directory, or download the repository from Hugging Face with `{command}`"
            ),
        }
    })
}

/// `OWNER/NAME`, if the path can be one.
fn name_of(path: &Path) -> Option<&str> {
    let name = path.to_str()?;
    let legal = |part: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty() && !part.starts_with('.') && part.chars().all(known)
    };
    let (owner, rest) = name.split_once('/')?;
    (legal(owner) && legal(rest)).then_some(name)
}

/// Hugging Face's directory, by the variables that its own library reads.
fn home(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let caches = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    variable("HF_HOME").or_else(|| Some(caches()?.join("huggingface")))
}

fn cache(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    variable("HF_HUB_CACHE").or_else(|| Some(home(variable)?.join("hub")))
}

/// The snapshot of a repository that its branch `main` was at when it was brought; else the only one.
fn snapshot(cache: &Path, kind: &str, name: &str) -> Option<PathBuf> {
    let folder = cache.join(format!("{kind}--{}", name.replace('/', "--")));
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

    fn is_made(dir: &Path) {
        fs::create_dir_all(dir).expect("a directory can be made");
    }

    #[test]
    fn a_cache_is_where_the_variables_say() {
        let of = |set: &'static str| cache(move |name: &str| (name == set).then(|| PathBuf::from("/c")));
        assert_eq!(of("HF_HUB_CACHE"), Some("/c".into()));
        assert_eq!(of("HF_HOME"), Some("/c/hub".into()));
        assert_eq!(of("XDG_CACHE_HOME"), Some("/c/huggingface/hub".into()));
        assert_eq!(of("HOME"), Some("/c/.cache/huggingface/hub".into()));
        assert_eq!(of("OTHER"), None);
    }

    #[test]
    fn a_snapshot_is_the_one_of_main_or_the_only_one() {
        let cache = tempfile::tempdir().expect("a directory for the test");
        let folder = cache.path().join("models--owner--name");
        is_made(&folder.join("snapshots/a"));
        assert_eq!(snapshot(cache.path(), "models", "owner/name"), Some(folder.join("snapshots/a")));
        is_made(&folder.join("snapshots/b"));
        assert_eq!(snapshot(cache.path(), "models", "owner/name"), None, "two, and none is named");
        is_made(&folder.join("refs"));
        fs::write(folder.join("refs/main"), "b\n").expect("written");
        assert_eq!(snapshot(cache.path(), "models", "owner/name"), Some(folder.join("snapshots/b")));
    }

    #[test]
    fn a_name_is_looked_up_and_a_path_is_not() {
        let place = tempfile::tempdir().expect("a directory for the test");
        let root = place.path().to_path_buf();
        let find = |path: &str, repository| {
            directory_by(Path::new(path), repository, |name| (name == "HF_HOME").then(|| root.clone()))
        };
        for path in ["/no/where", "a/b/c", "./a", "../a", "alone", "a/.b", "s3://a/b"] {
            let found = find(path, Repository::Model).expect("it is no name");
            assert_eq!(found, Path::new(path));
        }
        let empty = root.join("empty");
        is_made(&empty);
        let message =
            find(&empty.display().to_string(), Repository::Model).expect_err("no model").to_string();
        assert!(message.contains("empty: (directory): is empty; name another directory"), "{message}");
        let message = find("owner/name", Repository::Model).expect_err("nothing is there").to_string();
        assert!(
            message.contains("no such directory") && message.contains("`hf download owner/name`"),
            "{message}"
        );
        let message = find("owner/set", Repository::Dataset).expect_err("nothing is there").to_string();
        assert!(message.contains("`hf download --repo-type dataset owner/set`"), "{message}");
        for (dir, path, repository) in [
            ("hub/models--owner--name/snapshots/1", "owner/name", Repository::Model),
            ("hub/datasets--owner--set/snapshots/1", "owner/set", Repository::Dataset),
            ("lerobot/hub/datasets--owner--set/snapshots/2", "owner/set", Repository::Dataset),
            // As LeRobot records it, which goes before what was brought.
            ("lerobot/owner/set", "owner/set", Repository::Dataset),
        ] {
            is_made(&root.join(dir));
            assert_eq!(find(path, repository).expect("it is there"), root.join(dir));
        }
    }
}
