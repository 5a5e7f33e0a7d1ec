//! What a person asks of a store: what is in it, whether it is sound, and what can go. Runs may use the store
//! meanwhile, and evict: what goes while it is looked at is as if it had gone before.

use std::{
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use coxswain_proto::run_spec::CacheDtype;

use super::{
    clock,
    coverage::{self, Coverage},
    digest::NamespaceKey,
    directory::{entries, files_below},
    error::{DamagedRecord, StoreError},
    namespace::shard_names,
    namespace_file::{self, NamespaceDescription},
    shard::Shard,
    store::Store,
    usage,
};

/// A namespace as it lies on disk.
#[derive(Clone, Debug)]
pub struct NamespaceReport {
    /// Directory.
    pub dir: PathBuf,
    /// Name.
    pub key: NamespaceKey,
    /// What its records share.
    pub description: NamespaceDescription,
    /// Different samples stored.
    pub samples: u64,
    /// Shards.
    pub shards: u64,
    /// Shards that are being written, or that were when their writer died.
    pub unfinished: u64,
    /// Bytes of all its files.
    pub bytes: u64,
    /// When it was last opened or left.
    pub last_used: Option<SystemTime>,
    /// Whether a living process has it open.
    pub in_use: bool,
    /// Relative L2 error of storing; 0 for float32.
    pub rounding_error: f64,
    /// What runs have noted about it.
    pub coverage: Vec<Coverage>,
    /// Shards that cannot be used at all.
    pub unusable: Vec<String>,
}

/// What reading everything has shown.
#[derive(Clone, Debug, Default)]
pub struct VerifyReport {
    /// Records read and found sound.
    pub records: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Records and shards that are not what was written.
    pub damaged: Vec<DamagedRecord>,
    /// Files that cannot be used for another reason: newer, foreign, unreadable.
    pub unusable: Vec<String>,
}

/// What was removed, or would be.
#[derive(Clone, Debug, Default)]
pub struct Garbage {
    /// Shards of writers that died.
    pub unfinished: Vec<PathBuf>,
    /// Shards that cannot be used.
    pub unusable: Vec<PathBuf>,
    /// Namespaces over the budget.
    pub namespaces: Vec<PathBuf>,
    /// Bytes freed by all of it.
    pub bytes: u64,
}

/// A younger unfinished file may be one whose writer has made it and not locked it yet.
const SETTLED: std::time::Duration = std::time::Duration::from_secs(10);

impl Store {
    /// All namespaces, the one used last first, and directories that cannot be read as namespaces, each with
    /// the reason.
    pub fn list(&self) -> Result<(Vec<NamespaceReport>, Vec<String>), StoreError> {
        let (mut namespaces, mut strange) = (Vec::new(), Vec::new());
        for dir in self.directory.namespace_dirs()? {
            match namespace_file::read(&dir) {
                Ok(Some((key, description))) => {
                    namespaces.extend(StoreError::unless_gone(report(dir, key, description).map(Some))?);
                }
                Ok(None) if !dir.exists() => {}
                Ok(None) => {
                    strange.push(format!("{}: has no space.json; `cox cache gc` removes it", dir.display()))
                }
                Err(error) => strange.push(error.to_string()),
            }
        }
        namespaces.sort_by_key(|namespace| std::cmp::Reverse(namespace.last_used));
        Ok((namespaces, strange))
    }

    /// Reads every record of every shard.
    pub fn verify(&self) -> Result<VerifyReport, StoreError> {
        let mut verified = VerifyReport::default();
        for dir in self.directory.namespace_dirs()? {
            match namespace_file::read(&dir) {
                Ok(Some((key, description))) => {
                    for name in StoreError::unless_gone(shard_names(&dir))? {
                        verified.shard(&dir.join(name), &key, description.dtype, description.width);
                    }
                }
                Ok(None) if !dir.exists() => {}
                Ok(None) => verified.unusable.push(format!("{}: has no space.json", dir.display())),
                Err(error) => verified.unusable.push(error.to_string()),
            }
        }
        Ok(verified)
    }

    /// Removes what is of no use: shards of dead writers, shards that are damaged as a whole, and, with a
    /// budget, namespaces beyond it that no living process has open. With `dry_run` it only says what it
    /// would remove.
    pub fn gc(&self, budget: Option<u64>, dry_run: bool) -> Result<Garbage, StoreError> {
        let mut collected = Garbage::default();
        self.collect_undescribed(dry_run, &mut collected)?;
        let mut remove = |path: &Path, list: fn(&mut Garbage) -> &mut Vec<PathBuf>| {
            let metadata = fs::metadata(path);
            let is_dir = metadata.as_ref().is_ok_and(fs::Metadata::is_dir);
            collected.bytes += if is_dir { files_below(path) } else { metadata.map_or(0, |m| m.len()) };
            list(&mut collected).push(path.to_path_buf());
            match (dry_run, is_dir) {
                (true, _) => Ok(()),
                (false, true) => usage::clear(path),
                (false, false) => {
                    StoreError::unless_gone(fs::remove_file(path).map_err(StoreError::io("remove", path)))
                }
            }
        };
        for path in self.directory.evicted()? {
            remove(&path, |c| &mut c.unfinished)?;
        }
        let mut dirs = self.directory.namespace_dirs()?;
        dirs.extend([self.dir().to_path_buf(), self.keys_dir()]);
        for dir in dirs.iter().filter(|dir| dir.is_dir()) {
            for path in
                StoreError::unless_gone(unfinished(dir))?.into_iter().filter(|path| is_abandoned(path))
            {
                remove(&path, |c| &mut c.unfinished)?;
            }
            let Ok(Some((key, description))) = namespace_file::read(dir) else { continue };
            for path in StoreError::unless_gone(shard_names(dir))?.into_iter().map(|name| dir.join(name)) {
                let shard = Shard::open(&path, &key, description.dtype, description.width);
                if matches!(shard, Err(StoreError::Damaged(_) | StoreError::Foreign { .. })) {
                    remove(&path, |c| &mut c.unusable)?;
                    if !dry_run {
                        coverage::lose(dir, None)?;
                    }
                }
            }
        }
        let Some(budget) = budget else { return Ok(collected) };
        let over = match dry_run {
            false => self.directory.evict_down_to(budget, None)?,
            true => {
                let mut used = self.bytes()?.saturating_sub(collected.bytes);
                let mut unused = self.directory.unused(None)?;
                unused.retain(|(_, bytes)| {
                    let goes = used > budget;
                    used = used.saturating_sub(if goes { *bytes } else { 0 });
                    goes
                });
                unused
            }
        };
        collected.bytes += over.iter().map(|(_, bytes)| bytes).sum::<u64>();
        collected.namespaces = over.into_iter().map(|(dir, _)| dir).collect();
        Ok(collected)
    }

    /// Namespaces whose maker died before describing them. One that is about to be described is in use,
    /// and stays: it is looked at and taken away under its lock.
    fn collect_undescribed(&self, dry_run: bool, collected: &mut Garbage) -> Result<(), StoreError> {
        for dir in self.directory.namespace_dirs()? {
            if !matches!(namespace_file::read(&dir), Ok(None)) {
                continue;
            }
            let bytes = files_below(&dir);
            let goes = match dry_run {
                true => !usage::last_use(&dir).1,
                false => usage::evict(&dir)?,
            };
            if goes {
                collected.bytes += bytes;
                collected.unfinished.push(dir);
            }
        }
        Ok(())
    }
}

impl VerifyReport {
    /// Whether everything is as it was written.
    pub fn is_sound(&self) -> bool {
        self.damaged.is_empty() && self.unusable.is_empty()
    }

    fn shard(&mut self, path: &Path, key: &NamespaceKey, dtype: CacheDtype, width: u32) {
        let shard = match Shard::open(path, key, dtype, width) {
            Ok(shard) => shard,
            Err(StoreError::Damaged(damage)) => return self.damaged.push(damage),
            Err(error) if error.is_gone() => return,
            Err(error) => return self.unusable.push(error.to_string()),
        };
        self.bytes += shard.bytes();
        for record in 0..shard.len() {
            match shard.lead(record).and_then(|_| shard.values(record)) {
                Ok(_) => self.records += 1,
                Err(damage) => self.damaged.push(damage),
            }
        }
    }
}

fn report(
    dir: PathBuf,
    key: NamespaceKey,
    description: NamespaceDescription,
) -> Result<NamespaceReport, StoreError> {
    let (mut samples, mut unusable) = (std::collections::HashSet::new(), Vec::new());
    let (mut error, mut norm) = (0.0, 0.0);
    let names = shard_names(&dir)?;
    for name in &names {
        match Shard::open(&dir.join(name), &key, description.dtype, description.width) {
            Ok(shard) => {
                samples.extend(shard.keys());
                error += shard.rounding.squared_error;
                norm += shard.rounding.squared_norm;
            }
            Err(fault) if fault.is_gone() => {}
            Err(fault) => unusable.push(fault.to_string()),
        }
    }
    let (last_used, in_use) = usage::last_use(&dir);
    Ok(NamespaceReport {
        samples: samples.len() as u64,
        shards: names.len() as u64,
        unfinished: unfinished(&dir)?.len() as u64,
        bytes: files_below(&dir),
        rounding_error: if norm > 0.0 { f64::sqrt(error / norm) } else { 0.0 },
        coverage: coverage::read(&dir, samples.len() as u64),
        dir,
        key,
        description,
        last_used,
        in_use,
        unusable,
    })
}

/// Files that are being written, or were when their writer died.
fn unfinished(dir: &Path) -> Result<Vec<PathBuf>, StoreError> {
    entries(dir, |name| name.starts_with("open-") && name.ends_with(".tmp"))
}

fn is_abandoned(path: &Path) -> bool {
    let age = fs::metadata(path).and_then(|m| m.modified()).map(|at| clock::file_time().duration_since(at));
    matches!(age, Ok(Ok(age)) if age > SETTLED) && !usage::writer_lives(path)
}
