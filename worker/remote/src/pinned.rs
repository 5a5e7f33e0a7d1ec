//! Objects as a run saw them first, in a file of the run: a worker that is started again, or on another
//! machine, goes on with the same ones or not at all.
//!
//! A line is length, version and path, separated by tabs. Only what data sets are made of is listed: a text
//! about a data set may change.

use std::{collections::BTreeMap, fmt::Write, fs, io, path::Path};

use coxswain_proto::first;

use crate::{error::RemoteError, remotes::known};

/// Endings of files that data sets are made of.
const OF_DATA_SETS: [&str; 4] = ["json", "jsonl", "parquet", "mp4"];

/// Compares all objects below `address` with what `file` says of them, or writes it if it is not there. The
/// path of the object that is another one comes with the error.
pub fn pin(address: &str, file: &Path) -> Result<(), (String, RemoteError)> {
    let unnamed = |error| (String::new(), error);
    let refused =
        |error: io::Error| unnamed(RemoteError::Refused(format!("cannot save {}: {error}", file.display())));
    let is_data = |path: &str| {
        let ending = Path::new(path).extension().and_then(|ending| ending.to_str());
        ending.is_some_and(|ending| OF_DATA_SETS.contains(&ending))
    };
    let now = known(address).map_err(unnamed)?.into_iter().filter(|(path, _)| is_data(path));
    let now: BTreeMap<String, String> =
        now.map(|(path, seen)| (path, format!("{}\t{}", seen.len, seen.version))).collect();
    if !file.exists() {
        write(file, &now).map_err(refused)?;
    }
    let text = fs::read_to_string(file).map_err(refused)?;
    for line in text.lines() {
        let Some((seen, path)) = line.rsplit_once('\t') else { continue };
        if now.get(path).map(String::as_str) != Some(seen) {
            let found = now.get(path).map_or("removed", |_| "replaced");
            let what = format!("it was {found} after the run began (original versions: {})", file.display());
            return Err((path.to_owned(), RemoteError::Changed(what)));
        }
    }
    Ok(())
}

/// Writes the file, unless somebody else has meanwhile.
fn write(file: &Path, objects: &BTreeMap<String, String>) -> io::Result<()> {
    fs::create_dir_all(file.parent().unwrap_or(Path::new(".")))?;
    let mut text = String::new();
    for (path, seen) in objects {
        writeln!(text, "{seen}\t{path}").expect("memory takes it");
    }
    first::make(file, 0o666, text.as_bytes()).map(drop)
}
