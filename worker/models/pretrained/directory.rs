//! A model's directory, wherever it lies: on a disk as it is, or a bucket's or server's files brought to one.
//!
//! Only what is read here is brought: the files beside the weights, and `model.safetensors` or the shards
//! that the index names. Weights are mapped into memory, so they have to be files; where only their sizes
//! matter, headers are brought, and files have holes where tensors would be.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use coxswain_data::{
    DataError,
    place::{
        self, Piece,
        hub::{self, Repository},
    },
    text,
};
use serde::Deserialize;

use super::content::BESIDE;

/// What a merged checkpoint has besides, for other programs.
const FOR_OTHERS: [&str; 5] =
    ["generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Bytes that say how long a safetensors file's header is.
const HEADER_LEN: u64 = 8;
/// Longer headers are not believed: safetensors' own limit.
const MAX_HEADER: u64 = 100_000_000;

/// What is wanted of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Wish {
    Headers,
    Values,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// A directory with configuration, tokenizer and the headers of the weights: for sizes.
pub fn outline(path: &str) -> Result<PathBuf, DataError> {
    at_hand(path, Wish::Headers)
}

/// A directory with all that is read of the model.
pub fn whole(path: &str) -> Result<PathBuf, DataError> {
    at_hand(path, Wish::Values)
}

fn at_hand(path: &str, wanted: Wish) -> Result<PathBuf, DataError> {
    /// What this process has asked for before: a model is one version for as long as it runs.
    static KNOWN: Mutex<BTreeMap<(String, Wish), PathBuf>> = Mutex::new(BTreeMap::new());
    let root = Path::new(path);
    if !place::is_remote(root) {
        return hub::directory(root, Repository::Model);
    }
    // Held while files are brought: other threads want the same ones.
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    // Where the values are, the headers are, too.
    let found = [wanted, Wish::Values].into_iter().find_map(|had| known.get(&(path.to_owned(), had)));
    if let Some(dir) = found {
        return Ok(dir.clone());
    }
    let dir = place::folder(root, &pieces(root, wanted)?)?;
    known.insert((path.to_owned(), wanted), dir.clone());
    Ok(dir)
}

fn pieces(root: &Path, wanted: Wish) -> Result<Vec<Piece>, DataError> {
    place::enter(root)?;
    // What has none is no model, or no directory at all.
    place::open(&root.join(BESIDE[0]))?;
    let is_there = |name: &&str| Ok(place::bytes(&root.join(name))?.is_some());
    let mut pieces = Vec::new();
    for name in BESIDE.iter().chain(&FOR_OTHERS) {
        if is_there(name)? {
            pieces.push(Piece { name: (*name).to_owned(), head: None });
        }
    }
    let shards = match is_there(&WEIGHTS)? {
        true => BTreeSet::from([WEIGHTS.to_owned()]),
        false if is_there(&INDEX)? => {
            pieces.push(Piece { name: INDEX.to_owned(), head: None });
            shards(&root.join(INDEX))?
        }
        false if wanted == Wish::Values => {
            let found = format!("has neither {WEIGHTS} nor {INDEX}");
            let remedy = "copy the checkpoint's safetensors files there";
            return Err(DataError::invalid(root, "(directory)", found, remedy));
        }
        false => BTreeSet::new(),
    };
    for name in shards {
        let head = match wanted {
            Wish::Headers => Some(header(&root.join(&name))?),
            Wish::Values => None,
        };
        pieces.push(Piece { name, head });
    }
    Ok(pieces)
}

/// The files that an index names; each lies beside it.
fn shards(index: &Path) -> Result<BTreeSet<String>, DataError> {
    let Index { weight_map } = text::read_json(index)?;
    let names: BTreeSet<_> = weight_map.into_values().collect();
    let is_name = |name: &&String| !name.starts_with('.') && !name.contains(['/', '\\']);
    match names.iter().find(|name| !is_name(name)) {
        None => Ok(names),
        Some(bad) => {
            let found = format!("names the file `{bad}`");
            let remedy = "give file names without a directory; shards must be next to the index";
            Err(DataError::invalid(index, "weight_map", found, remedy))
        }
    }
}

/// Bytes up to the first tensor.
fn header(path: &Path) -> Result<u64, DataError> {
    let content = place::open(path)?;
    let mut len = [0; HEADER_LEN as usize];
    content.read_at(0, &mut len).map_err(DataError::io(path, "read"))?;
    let len = u64::from_le_bytes(len);
    // A file that is none of this format is refused by who reads it.
    Ok(if len <= MAX_HEADER { HEADER_LEN + len } else { HEADER_LEN })
}
