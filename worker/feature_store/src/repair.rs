//! Parts without their damaged records: what `cox cache verify --repair` writes.
//!
//! Reading finds a damaged record each time, counts it as a miss, and a newer part has it again; but the old part keeps it, and with it the
//! bytes, and every verification names it. A repair copies the records that are sound, as they are coded, to a file that then takes the old
//! part's name: whoever opens the part finds one or the other, whole, and whoever has the old one mapped reads on in it. On a network file
//! system that is not so for readers on other machines, so a space that is in use there is refused.
//!
//! What it does not do: compute anything. What was damaged is computed again by the run that needs it.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use super::{
    coverage,
    digest::SampleKey,
    error::{Damaged, StoreError},
    part::{self, Entry, Part},
    space::part_names,
    space_file::{self, SpaceDescription},
    store::Store,
    usage,
};

/// Records reach the system in writes of this size.
const BUFFER: usize = 1 << 20;

/// One part, after a repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repaired {
    /// The part. It is gone if nothing in it was sound.
    pub path: PathBuf,
    /// Records that it has now.
    pub kept: u64,
}

impl Store {
    /// Writes parts again without what [`verify`](Self::verify) found `damaged` in them, and removes those in which nothing is sound.
    /// Safe beside runs that use the store.
    pub fn repair(&self, damaged: &[Damaged]) -> Result<Vec<Repaired>, StoreError> {
        let mut paths: Vec<&PathBuf> = damaged.iter().map(|damage| &damage.path).collect();
        paths.dedup();
        let mut repaired = Vec::new();
        for in_one_space in paths.chunk_by(|a, b| a.parent() == b.parent()) {
            let dir = in_one_space[0].parent().unwrap_or(Path::new("."));
            repair_space(dir, in_one_space, &mut repaired)?;
        }
        Ok(repaired)
    }
}

/// Repairs parts of one space, and takes what they lose off the notes about it.
fn repair_space(dir: &Path, parts: &[&PathBuf], repaired: &mut Vec<Repaired>) -> Result<(), StoreError> {
    let Some((key, description)) = space_file::read(dir)? else {
        if !dir.exists() {
            // Evicted meanwhile.
            return Ok(());
        }
        return Err(StoreError::Foreign { path: dir.into(), detail: "has no space.json".into() });
    };
    if usage::loses_open_files(dir) && usage::last_use(dir).1 {
        let detail = "is in use, and on a network file system a repair would take parts away from runs on other machines; repair it when they \
                      have ended";
        return Err(StoreError::Foreign { path: dir.into(), detail: detail.into() });
    }
    let samples = || -> Result<HashSet<SampleKey>, StoreError> {
        let names = StoreError::unless_gone(part_names(dir))?.into_iter();
        let parts = names.map(|name| Part::open(&dir.join(name), &key, description.dtype, description.width));
        // Keys of parts that cannot be used are not known.
        Ok(parts.flatten().flat_map(|part| part.keys().collect::<Vec<_>>()).collect())
    };
    let (before, mut all_known) = (samples()?, true);
    for path in parts {
        let kept = match Part::open(path, &key, description.dtype, description.width) {
            Ok(part) => rewrite(&part, &description)?,
            // Index or header: nothing in it can be found.
            Err(StoreError::Damaged(_)) => {
                all_known = false;
                0
            }
            Err(error) if error.is_gone() => continue,
            Err(error) => return Err(error),
        };
        if kept == 0 {
            fs::remove_file(path).map_err(StoreError::io("remove", path))?;
            usage::sync_dir(dir)?;
        }
        repaired.push(Repaired { path: path.to_path_buf(), kept });
    }
    let after = samples()?;
    // Of another part, or one that a run has added meanwhile, is as good.
    let lost = before.difference(&after).count() as u64;
    coverage::lose(dir, Some(lost).filter(|_| all_known))
}

/// Puts the sound records of a part in its place; returns how many. Nothing happens if there are none.
fn rewrite(part: &Part, description: &SpaceDescription) -> Result<u64, StoreError> {
    let sound: Vec<(Entry, &[u8])> = (0..part.len()).filter_map(|record| part.sound(record).ok()).collect();
    if sound.is_empty() {
        return Ok(0);
    }
    let dir = part.path.parent().unwrap_or(Path::new("."));
    let staged = dir.join(format!("open-{}.tmp", usage::unique()));
    let written = write(&staged, part, description, &sound).and_then(|()| fs::rename(&staged, &part.path));
    if let Err(error) = written {
        // Whatever is left of it is invisible.
        let _ = fs::remove_file(&staged);
        return Err(StoreError::io("write", &part.path)(error));
    }
    usage::sync_dir(dir)?;
    Ok(sound.len() as u64)
}

fn write(
    staged: &Path,
    part: &Part,
    description: &SpaceDescription,
    sound: &[(Entry, &[u8])],
) -> std::io::Result<()> {
    let file = File::create_new(staged)?;
    // As for every part that is being written: the lock says that its writer lives.
    file.lock()?;
    let mut file = BufWriter::with_capacity(BUFFER, file);
    let header = part::header(description.dtype, description.width, &description.key());
    file.write_all(&header)?;
    let mut at = header.len() as u64;
    let mut entries = Vec::with_capacity(sound.len());
    for (entry, bytes) in sound {
        file.write_all(bytes)?;
        entries.push(Entry { offset: at, ..*entry });
        at += bytes.len() as u64;
    }
    // What rounding has done to each record is not known any more, only to all of them together.
    let rounding = part.rounding.scaled(sound.len() as f64 / part.len() as f64);
    let stride = sound.first().map_or(0, |(_, bytes)| bytes.len());
    file.write_all(&part::index_and_footer(&header, &entries, at, stride, rounding))?;
    file.flush()?;
    file.get_ref().sync_all()
}
