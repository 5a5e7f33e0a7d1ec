//! Shards without their damaged records: what `cox cache verify --repair` writes.
//!
//! Reading finds a damaged record each time, counts it as a miss, and a newer shard has it again; but the old
//! shard keeps it, and with it the bytes, and every verification names it. A repair copies the records that
//! are sound, as they are coded, to a file that then takes the old shard's name: a reader that opens the
//! shard finds one or the other, whole, and one that has the old file mapped reads on in it. On a network
//! file system that is not so for readers on other machines, so a namespace that is in use there is refused.
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
    error::{DamagedRecord, StoreError},
    namespace::shard_names,
    namespace_file::{self, NamespaceDescription},
    shard::{self, Entry, Shard},
    store::Store,
    usage,
};

/// Records reach the system in writes of this size.
const BUFFER: usize = 1 << 20;

/// One shard, after a repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// The shard. It is gone if it had no intact records.
    pub path: PathBuf,
    /// Records that it has now.
    pub kept: u64,
}

impl Store {
    /// Writes shards again without what [`verify`](Self::verify) found `damaged` in them, and removes those
    /// in which nothing is sound. Safe beside runs that use the store.
    pub fn repair(&self, damaged: &[DamagedRecord]) -> Result<Vec<Repair>, StoreError> {
        let mut paths: Vec<&PathBuf> = damaged.iter().map(|damage| &damage.path).collect();
        paths.dedup();
        let mut repaired = Vec::new();
        for in_one_namespace in paths.chunk_by(|a, b| a.parent() == b.parent()) {
            let dir = in_one_namespace[0].parent().unwrap_or(Path::new("."));
            repair_namespace(dir, in_one_namespace, &mut repaired)?;
        }
        Ok(repaired)
    }
}

/// Repairs shards of one namespace, and takes what they lose off the notes about it.
fn repair_namespace(dir: &Path, shards: &[&PathBuf], repaired: &mut Vec<Repair>) -> Result<(), StoreError> {
    let Some((key, description)) = namespace_file::read(dir)? else {
        if !dir.exists() {
            // Evicted meanwhile.
            return Ok(());
        }
        return Err(StoreError::Foreign { path: dir.into(), detail: "has no space.json".into() });
    };
    if usage::loses_open_files(dir) && usage::last_use(dir).1 {
        let detail = "is in use, and on a network file system a repair would remove shards that runs on \
                      other machines use; repair it when those runs have ended";
        return Err(StoreError::Foreign { path: dir.into(), detail: detail.into() });
    }
    let samples = || -> Result<HashSet<SampleKey>, StoreError> {
        let names = StoreError::unless_gone(shard_names(dir))?.into_iter();
        let shards =
            names.map(|name| Shard::open(&dir.join(name), &key, description.dtype, description.width));
        // Keys of shards that cannot be used are not known.
        Ok(shards.flatten().flat_map(|shard| shard.keys().collect::<Vec<_>>()).collect())
    };
    let (before, mut all_known) = (samples()?, true);
    for path in shards {
        let kept = match Shard::open(path, &key, description.dtype, description.width) {
            Ok(shard) => rewrite(&shard, &description)?,
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
        repaired.push(Repair { path: path.to_path_buf(), kept });
    }
    let after = samples()?;
    // Of another shard, or one that a run has added meanwhile, is as good.
    let lost = before.difference(&after).count() as u64;
    coverage::lose(dir, Some(lost).filter(|_| all_known))
}

/// Puts the sound records of a part in its place; returns how many. Nothing happens if there are none.
fn rewrite(shard: &Shard, description: &NamespaceDescription) -> Result<u64, StoreError> {
    let sound: Vec<(Entry, &[u8])> = (0..shard.len()).filter_map(|record| shard.sound(record).ok()).collect();
    if sound.is_empty() {
        return Ok(0);
    }
    let dir = shard.path.parent().unwrap_or(Path::new("."));
    let staged = dir.join(format!("open-{}.tmp", usage::unique()));
    let written = write(&staged, shard, description, &sound).and_then(|()| fs::rename(&staged, &shard.path));
    if let Err(error) = written {
        // Whatever is left of it is invisible.
        let _ = fs::remove_file(&staged);
        return Err(StoreError::io("write", &shard.path)(error));
    }
    usage::sync_dir(dir)?;
    Ok(sound.len() as u64)
}

fn write(
    staged: &Path,
    shard: &Shard,
    description: &NamespaceDescription,
    sound: &[(Entry, &[u8])],
) -> std::io::Result<()> {
    let file = File::create_new(staged)?;
    // As for every shard that is being written: the lock says that its writer lives.
    file.lock()?;
    let mut file = BufWriter::with_capacity(BUFFER, file);
    let header = shard::header(description.dtype, description.width, &description.key());
    file.write_all(&header)?;
    let mut at = header.len() as u64;
    let mut entries = Vec::with_capacity(sound.len());
    for (entry, bytes) in sound {
        file.write_all(bytes)?;
        entries.push(Entry { offset: at, ..*entry });
        at += bytes.len() as u64;
    }
    // What rounding has done to each record is not known any more, only to all of them together.
    let rounding = shard.rounding.scaled(sound.len() as f64 / shard.len() as f64);
    let stride = sound.first().map_or(0, |(_, bytes)| bytes.len());
    file.write_all(&shard::index_and_footer(&header, &entries, at, stride, rounding))?;
    file.flush()?;
    file.get_ref().sync_all()
}
