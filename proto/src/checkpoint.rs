//! Checkpoints on disk, as far as coordinator and workers must agree on them: the names of their directories,
//! and which of these are of a layout that this version reads.

use std::{io, path::Path};

use serde::{Deserialize, de::DeserializeOwned};

use crate::{bounded, ids::Step, limits::MAX_MANIFEST_BYTES};

/// The only layout there is.
pub const FORMAT: u32 = 1;
/// The file that describes a checkpoint, and is written last.
pub const MANIFEST: &str = "manifest.json";

const PREFIX: &str = "step-";

impl Step {
    /// The directory, below `checkpoints`, of the state after this many steps: `step-00000020`.
    pub fn checkpoint_dir(self) -> String {
        format!("{PREFIX}{self:08}")
    }

    /// Whose checkpoint a directory of this name is; none if it is nobody's, such as a copy that somebody has
    /// put there.
    pub fn of_checkpoint_dir(name: &str) -> Option<Self> {
        let step = Self(name.strip_prefix(PREFIX)?.parse().ok()?);
        (step.checkpoint_dir() == name).then_some(step)
    }
}

/// Why a directory is no checkpoint that could be read.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It is being written, is on its way out, or is none.
    #[error("there is no {MANIFEST}")]
    Absent,
    /// Nothing has written this, or what was written is damaged.
    #[error("{MANIFEST} is not valid: {0}; it is damaged, or was written by another version")]
    Garbled(String),
    /// Another version has written it.
    #[error("format {0} is unknown to this version, which reads format {FORMAT}")]
    UnknownFormat(u32),
}

/// What the manifest in a checkpoint's directory says.
pub fn read_manifest<M: DeserializeOwned>(directory: &Path) -> Result<M, ManifestError> {
    #[derive(Deserialize)]
    struct Layout {
        format: u32,
    }
    let bytes = bounded::read(&directory.join(MANIFEST), MAX_MANIFEST_BYTES).map_err(|error| {
        let is_absent = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
        if is_absent { ManifestError::Absent } else { ManifestError::Garbled(error.to_string()) }
    })?;
    let garbled = |error: serde_json::Error| ManifestError::Garbled(error.to_string());
    // First of all: in another layout the rest may be anything.
    let Layout { format } = serde_json::from_slice(&bytes).map_err(garbled)?;
    if format != FORMAT {
        return Err(ManifestError::UnknownFormat(format));
    }
    serde_json::from_slice(&bytes).map_err(garbled)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_checkpoint_is_known_by_its_whole_name() {
        for step in [0, 7, 20, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(Step::of_checkpoint_dir(&Step(step).checkpoint_dir()), Some(Step(step)));
        }
        assert_eq!(Step(20).checkpoint_dir(), "step-00000020");
        let strange = [
            "step-best",
            "step-20",
            "step-00000020-copy",
            "step-000000020",
            "step-+0000020",
            "step-",
            "notes",
        ];
        for name in strange {
            assert_eq!(Step::of_checkpoint_dir(name), None, "{name}");
        }
    }

    #[test]
    fn another_layout_is_told_from_damage_whatever_else_it_says() {
        #[derive(Debug, Deserialize)]
        struct StepManifest {
            step: u64,
        }
        let dir = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            fs::write(dir.path().join(MANIFEST), text).unwrap();
            read_manifest::<StepManifest>(dir.path())
        };
        assert_eq!(read(r#"{"format": 1, "step": 7, "later": []}"#).unwrap().step, 7);
        let later = read(r#"{"format": 2, "steps": [7]}"#).unwrap_err();
        assert!(later.to_string().starts_with("format 2 is unknown"), "{later}");
        for text in ["", "{", "{\"step\": 7}", "{\"format\": 1}"] {
            let garbled = read(text).unwrap_err();
            assert!(matches!(garbled, ManifestError::Garbled(_)), "{text:?}: {garbled}");
        }
        for nothing in [dir.path().join("nothing"), dir.path().join(MANIFEST)] {
            let absent = read_manifest::<StepManifest>(&nothing).unwrap_err();
            assert!(matches!(absent, ManifestError::Absent), "{absent}");
        }
    }
}
