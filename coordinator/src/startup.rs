//! What is read from disk before the first call: the journal, and the checkpoints in the run's output
//! directory.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use coxswain_identity::claims::Claims;
use coxswain_proto::{
    VERSION,
    checkpoint::{MANIFEST, ManifestError, read_manifest},
    document,
    ids::{Bytes, Step},
    in_place,
    plan::Plan,
    report::{CheckpointState, Skip},
    run_spec::RunSpec,
};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::{
    aside,
    core::{checkpoints::CheckpointEntry, machine::Config},
    journal::{
        self, Chronicle, Durable, Fence, Forgetful, Identity, Journal, JournalError, JournalThread, Life,
        RecoveredHistory, inherit, is_half_inherited,
    },
    options::Options,
};

/// Why a run cannot start from what is on disk.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The journal is damaged, and a person may want to go on without it.
    #[error("{source}. {}", way_out(*newest))]
    Unreadable {
        /// What is wrong with it.
        source: JournalError,
        /// The newest checkpoint, if the run would go on from one.
        newest: Option<Step>,
    },
    /// A new journal is asked for where there is no need.
    #[error("the journal in {} is intact: start again without --new-journal", directory.display())]
    Sound {
        /// Where it lies.
        directory: PathBuf,
    },
    /// A checkpoint of another run lies where this one would resume.
    #[error(
        "{} was written by a run with another specification (digest {found}, here {own}): give this run another \
         run.output_dir, or set train.resume=false to start over",
        path.display()
    )]
    ForeignCheckpoint {
        /// Manifest.
        path: PathBuf,
        /// Digest.
        found: String,
        /// This run's digest.
        own: String,
    },
    /// The run has come further than it is to go.
    #[error(
        "{length}, but {} already holds step {newest}: set at least {newest} steps, or set train.resume=false to start over",
        path.display()
    )]
    BeyondItsEnd {
        /// Where its checkpoints are.
        path: PathBuf,
        /// Length as configured: the key, and how many.
        length: String,
        /// Step of the newest checkpoint.
        newest: Step,
    },
    /// A checkpoint of another version lies where this one would resume.
    #[error(
        "checkpoint {}: {source}; resume with the version that wrote it, or set train.resume=false to start over",
        path.display()
    )]
    UnknownCheckpoint {
        /// Directory.
        path: PathBuf,
        /// Which it is.
        source: ManifestError,
    },
    /// There are checkpoints, and each of them is damaged.
    #[error(
        "{}: every checkpoint is damaged: {}; restore one of them from a copy, or set train.resume=false to start over (the damaged ones are then renamed and kept)",
        path.display(), damaged.join(", ")
    )]
    AllDamaged {
        /// Where they are.
        path: PathBuf,
        /// Which they are, and how they are damaged; newest first.
        damaged: Vec<String>,
    },
    /// The operating system said no.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

fn way_out(newest: Option<Step>) -> String {
    let kept = "the damaged one is kept as journal.redb.damaged-1";
    match newest {
        Some(step) => format!(
            "Launch with --new-journal to continue from checkpoints/{} with a new journal: {kept}, and \
             `cox audit` reports that earlier steps have no record",
            step.checkpoint_dir()
        ),
        None => format!(
            "There is no checkpoint to resume from: launch with --new-journal to start over with a new \
             journal; {kept}"
        ),
    }
}

/// Everything the driver starts from.
pub struct Start {
    /// What the core is made from.
    pub config: Config,
    /// Whose run it is.
    pub identity: Identity,
    /// Where its records go.
    pub journal: JournalThread,
}

/// `checkpoints/step-*/manifest.json` as far as the coordinator reads it.
#[derive(Deserialize)]
struct Manifest {
    step: u64,
    spec_digest: String,
    /// Absent from manifests of versions that let nothing change.
    core_digest: Option<String>,
    files: BTreeMap<String, ManifestFile>,
    /// Steps that were left out.
    #[serde(default)]
    skipped: BTreeMap<Step, Skip>,
}

#[derive(Deserialize)]
struct ManifestFile {
    bytes: u64,
}

/// `run.json`: whose directory this is.
#[derive(Serialize)]
struct RunFile<'a> {
    run_id: &'a str,
    name: &'a str,
    spec_digest: &'a str,
    version: &'a str,
    built: &'a str,
}

/// What a run goes on from, as far as lengths of files tell.
#[derive(Debug, Default)]
pub struct Resumption {
    /// The step of the newest whole checkpoint, if there is one.
    pub step: Option<Step>,
    /// Newer ones, which and how they are damaged; newest first.
    pub damaged: Vec<String>,
}

/// What a run finds in its output directory: read by those who launch it, before their first byte is written
/// there.
#[derive(Debug)]
pub struct Opening {
    /// Records; none where there are none, and where a living coordinator holds them.
    pub records: Option<Chronicle>,
    state: PathBuf,
    /// Journal cannot be read, and is to be set aside.
    damaged: bool,
}

impl Opening {
    /// Reads the records, and leaves them as they are. Damaged ones are refused, unless a `new_journal` is to
    /// take their place; and that is, where they can be read.
    pub fn read(spec: &RunSpec, new_journal: bool) -> Result<Self, StartError> {
        let state = Path::new(&spec.run.output_dir).join("coordinator");
        let (records, damaged) = match journal::read(&state) {
            Ok(_) if new_journal => return Err(StartError::Sound { directory: state }),
            Ok(records) => (Some(records), false),
            // Its coordinator may be on its way out, and is waited for.
            Err(JournalError::InUse { .. }) => (None, false),
            Err(_) if !journal::exists(&state) => (None, false),
            Err(error) if error.is_damage() && new_journal => (None, true),
            Err(source) if source.is_damage() => {
                let checkpoints = if spec.train.resume { found(spec, None)?.0 } else { Vec::new() };
                let newest = checkpoints.last().map(|newest| newest.step);
                return Err(StartError::Unreadable { source, newest });
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Self { records, state, damaged })
    }

    /// Sets a damaged journal aside, so that the run begins with a new one. The name that it has from then
    /// on.
    pub fn set_journal_aside(&self) -> Result<Option<PathBuf>, StartError> {
        let failed =
            |source| StartError::Io { action: "set aside the journal in", path: self.state.clone(), source };
        self.damaged.then(|| journal::copies::set_aside(&self.state)).transpose().map_err(failed)
    }

    /// What this run would go on from. Refuses what [`prepare`] would, and checkpoints of which none is
    /// whole: to start over, though steps are kept, takes a person's word.
    pub fn accept(&self, spec: &RunSpec) -> Result<Resumption, StartError> {
        let records = self.records.as_ref();
        if let Some((records, theirs)) = records.and_then(|of| Some((of, of.identity.as_ref()?))) {
            journal::changes(&self.state, theirs, spec, Step(records.steps.len() as u64))?;
        }
        if !spec.train.resume {
            return Ok(Resumption::default());
        }
        let dataset = records.and_then(|records| records.dataset.as_ref());
        let (checkpoints, _) = found(spec, dataset.map(|dataset| dataset.training_samples))?;
        let output = Path::new(&spec.run.output_dir);
        let mut damaged = Vec::new();
        // Workers set aside what is cut short, and go on from the one before it.
        for checkpoint in checkpoints.iter().rev() {
            match damage(&output.join(&checkpoint.path)) {
                None => return Ok(Resumption { step: Some(checkpoint.step), damaged }),
                Some(how) => damaged.push(format!("{} ({how})", checkpoint.path)),
            }
        }
        if damaged.is_empty() {
            return Ok(Resumption::default());
        }
        Err(StartError::AllDamaged { path: output.join("checkpoints"), damaged })
    }
}

/// Checkpoints that the run goes on from, if none of them is beyond its end; its data set may be known to
/// have so many samples.
fn found(spec: &RunSpec, samples: Option<u64>) -> Result<CheckpointScan, StartError> {
    let path = Path::new(&spec.run.output_dir).join("checkpoints");
    let scanned = scan(&path, spec)?;
    let train = &spec.train;
    let length = match (train.steps, train.epochs, samples) {
        (Some(steps), ..) => Some((steps, format!("train.steps is {steps}"))),
        (None, Some(epochs), Some(samples)) => Plan::new(train, samples).ok().map(|plan| {
            let steps = plan.total_steps();
            (steps, format!("train.epochs is {epochs}, which is {steps} steps"))
        }),
        _ => None,
    };
    match (length, scanned.0.last()) {
        (Some((steps, length)), Some(newest)) if newest.step.0 > steps => {
            Err(StartError::BeyondItsEnd { path, length, newest: newest.step })
        }
        _ => Ok(scanned),
    }
}

/// Reads what is on disk, claims the state directory and writes `run.json`. From `stop` on, the journal waits
/// for no disk that is full.
pub fn prepare(options: &Options, stop: &CancellationToken) -> Result<Start, StartError> {
    let mut beside = None;
    if options.spec.train.resume && !options.restarted {
        // Before the journal is touched: what is refused here changes nothing.
        match found(&options.spec, None) {
            // A journal says which keys differ.
            Err(StartError::ForeignCheckpoint { .. })
                if options.state_dir.as_deref().is_some_and(journal::exists) => {}
            looked => beside = looked?.0.last().map(|newest| newest.step),
        }
    }
    let fresh = fresh_run_id(&options.spec.run.name);
    let (journal, identity, memory) = open_journal(options, &fresh, beside, stop)?;
    let output = Path::new(&options.spec.run.output_dir);
    // The journal is ours by now: no other run trains in this directory.
    if !options.spec.train.resume && !options.restarted {
        aside::set_aside(output).map_err(|source| StartError::Io {
            action: "set aside the earlier checkpoints in",
            path: output.to_path_buf(),
            source,
        })?;
    }
    let (checkpoints, skipped) = found(&options.spec, None)?;
    for change in &memory.changed {
        tracing::info!(target: "coxswain::run", key = change.key, from = change.from, to = change.to, "{change}");
    }
    write_run_file(output, &identity, options.built)?;
    let spawned = JournalThread::spawn(journal).map_err(|source| StartError::Io {
        action: "start the journal thread for",
        path: output.to_path_buf(),
        source,
    });
    let config = Config {
        run_id: identity.run_id.clone(),
        version: VERSION.to_owned(),
        train: options.spec.train.clone(),
        cache: options.spec.cache.clone(),
        faults: options.spec.faults.clone(),
        world: options.world,
        patience: options.patience,
        budgets: options.budgets,
        seed: options.spec.run.seed,
        life: memory.lives + 1,
        restarted: options.restarted,
        in_place_of: options.in_place_of.clone(),
        past: memory.past,
        checkpoints,
        skipped,
    };
    Ok(Start { config, identity, journal: spawned? })
}

fn open_journal(
    options: &Options,
    fresh: &str,
    beside: Option<Step>,
    stop: &CancellationToken,
) -> Result<(Box<dyn Journal>, Identity, RecoveredHistory), JournalError> {
    let run_id = options.run_id.as_deref().filter(|run_id| !run_id.is_empty());
    Ok(match &options.state_dir {
        Some(directory) => {
            let (mut journal, identity, memory) = {
                let life = match options.spec.train.resume {
                    _ if options.restarted => Life::Restarted,
                    true => Life::Again,
                    false => Life::Anew,
                };
                if options.in_place_of.is_some() || is_half_inherited(directory) {
                    inherit(directory)?;
                }
                Durable::open(directory.as_path(), &options.spec, run_id, fresh, life)?
            };
            // A coordinator that was lost may have begun it, and nothing else.
            if let Some(checkpoint) = beside.filter(|_| memory.lives == 0) {
                tracing::warn!(
                    target: "coxswain::run",
                    directory = %directory.display(),
                    "the journal is missing: the run continues from checkpoints/{} with a new one, and \
                     `cox audit` will find no record of earlier steps",
                    checkpoint.checkpoint_dir()
                );
                journal.begin_beside(checkpoint)?;
            }
            let journal = journal.until(stop.clone());
            match options.claim {
                None => (Box::new(journal), identity, memory),
                Some(number) => {
                    let claims = Claims::of_run(Path::new(&options.spec.run.output_dir));
                    (Box::new(Fence::new(journal, number, move || claims.is_lost(number))), identity, memory)
                }
            }
        }
        None => {
            let identity = Identity::new(&options.spec, run_id.unwrap_or(fresh).to_owned());
            (Box::new(Forgetful::default()), identity, RecoveredHistory::default())
        }
    })
}

/// Checkpoints on disk, and the steps of which they say that they were left out.
type CheckpointScan = (Vec<CheckpointEntry>, BTreeMap<Step, Skip>);

/// Complete checkpoints, oldest first. Directories without a readable manifest do not count: they are being
/// written, or broken; nor do those with a name of their own: copies that people have made.
fn scan(directory: &Path, spec: &RunSpec) -> Result<CheckpointScan, StartError> {
    let failed = |source| StartError::Io { action: "read", path: directory.to_path_buf(), source };
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(CheckpointScan::default()),
        other => other.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        let Some(step) = name.to_str().and_then(Step::of_checkpoint_dir) else { continue };
        let path = directory.join(&name);
        let Some(manifest) = manifest(&path)?.filter(|manifest| manifest.step == step.0) else { continue };
        let entry = CheckpointEntry {
            step,
            path: format!("checkpoints/{}", step.checkpoint_dir()),
            bytes: Bytes(manifest.files.values().fold(0, |sum, file| sum.saturating_add(file.bytes))),
            state: CheckpointState::Complete,
        };
        found.push((entry, path, manifest));
    }
    found.sort_by_key(|(entry, ..)| entry.step);
    let own = document::digest(spec);
    if let Some((_, path, newest)) = found.last()
        && newest.spec_digest != own
        && newest.core_digest != Some(document::core_digest(spec))
    {
        let (path, found) = (path.join(MANIFEST), newest.spec_digest.clone());
        return Err(StartError::ForeignCheckpoint { path, found, own });
    }
    let mut skipped = BTreeMap::new();
    let entries = found.into_iter().map(|(entry, _, manifest)| {
        skipped.extend(manifest.skipped);
        entry
    });
    Ok((entries.collect(), skipped))
}

/// The first file of a checkpoint that has not the length that its manifest says, if there is one.
fn damage(path: &Path) -> Option<String> {
    let Ok(Some(manifest)) = manifest(path) else { return Some(format!("{MANIFEST} cannot be read")) };
    manifest.files.iter().find_map(|(name, file)| match fs::metadata(path.join(name)) {
        Ok(found) if found.len() == file.bytes => None,
        Ok(found) => Some(format!("{name} has {} bytes instead of {}", found.len(), file.bytes)),
        Err(error) => Some(format!("{name}: {error}")),
    })
}

fn manifest(path: &Path) -> Result<Option<Manifest>, StartError> {
    match read_manifest(path) {
        Ok(manifest) => Ok(Some(manifest)),
        Err(ManifestError::Absent) => Ok(None),
        Err(error @ ManifestError::Garbled(_)) => {
            tracing::warn!(path = %path.display(), %error, "a damaged checkpoint is ignored");
            Ok(None)
        }
        Err(source @ ManifestError::UnknownFormat(_)) => {
            Err(StartError::UnknownCheckpoint { path: path.to_path_buf(), source })
        }
    }
}

fn write_run_file(output: &Path, identity: &Identity, built: &str) -> Result<(), StartError> {
    let failed = |action, path: &Path| {
        let path = path.to_path_buf();
        move |source| StartError::Io { action, path, source }
    };
    fs::create_dir_all(output).map_err(failed("create", output))?;
    let file = RunFile {
        run_id: &identity.run_id,
        name: &identity.run_name,
        spec_digest: &identity.spec_digest,
        version: VERSION,
        built,
    };
    let text = serde_json::to_string_pretty(&file).expect("run.json is strings");
    let text = text + "\n";
    let path = output.join("run.json");
    // A coordinator that takes the place of another one finds it there, and may find no room for another.
    if fs::read(&path).is_ok_and(|there| there == text.as_bytes()) {
        return Ok(());
    }
    in_place::replace(&path, text.as_bytes()).map_err(failed("write", &path))
}

/// `NAME-1f2e3d4c`: readable, and different for every start without `--rdzv-id`.
fn fresh_run_id(name: &str) -> String {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let random = RandomState::new().build_hasher().finish() as u32;
    format!("{name}-{random:08x}")
}
