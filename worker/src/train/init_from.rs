//! Weights of another run as the first values of this one (`train.init_from`): nothing but weights.
//!
//! ```text
//! a run directory       its newest complete checkpoint, else what it has exported
//! a checkpoint          its trainables
//! anything else         what the task can read: its own formats
//! ```
//!
//! A tensor is taken if this run trains one of the same name and shape. What is there and has no place here
//! is refused, tensor by tensor, before anything runs; what is here and not there keeps its drawn value, and
//! that is said.
//!
//! Constants ([`TrainableLayout::constants`]) have no other values than those that are brought: every worker
//! that builds the model reads them here ([`bring`]), at a resume, too. Checkpoints have them all the same:
//! one is all that another run needs.
//!
//! What this file does not do: resume. A checkpoint of this run itself goes before all of this.

use std::{
    collections::BTreeMap,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use coxswain_nn::{
    files::{StoredTensor, read_tensors},
    params::{Group, ParamSpec, TrainableLayout},
    pulse,
    tensor_file::{OpenFile, TensorFile},
};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::{Task, TaskError};

use super::results::checkpoint::{
    Checkpoint, CheckpointError, FileEntry, SPEC_FILE, Store, TRAINABLES, io_error,
};

/// Most tensors that a message names.
const NAMED: usize = 40;
/// The remedy for tensors of other sizes.
const OTHER_SIZES: &str =
    "change this run's sizes, or load only some groups: `train.init_from: {GROUP: PATH}`";

/// Why a run cannot start from the weights that it names.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// Nothing there is known to the engine or to the task.
    #[error(
        "train.init_from: {} holds no weights that this task can start from; name a run directory that has a \
         checkpoint or results, a checkpoint, or a file of weights",
        path.display()
    )]
    NothingThere {
        /// As the run file names it.
        path: PathBuf,
    },
    /// Weights that have no place in this run, or another meaning.
    #[error("train.init_from: {} does not fit this run:{list}\n{remedy}", path.display())]
    Misfits {
        /// As the run file names it.
        path: PathBuf,
        /// One line each, every one after a line break.
        list: String,
        /// What to do.
        remedy: &'static str,
    },
    /// What does not train has to come from somewhere.
    #[error(
        "train.init_from has no values for parameters that this run does not train:{list}\nname a source \
         that has them, or let them train"
    )]
    NotBrought {
        /// One line each, every one after a line break.
        list: String,
    },
    /// Other weights than those that the run was launched with.
    #[error(
        "train.init_from: its files have digest {found}, but the run was launched with {launched}: every \
         node must see the same, unchanged files"
    )]
    Changed {
        /// Digest of what is there now.
        found: String,
        /// `train.init_digest`.
        launched: String,
    },
    /// A file cannot be read, or is damaged.
    #[error("train.init_from: {0}")]
    Checkpoint(#[from] CheckpointError),
    /// The task cannot read its own format.
    #[error("train.init_from: {0}")]
    Task(#[from] TaskError),
    /// The system refused.
    #[error("train.init_from: {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
}

/// One place that weights come from.
enum WeightSource {
    Checkpoint(Box<Checkpoint>),
    Task { path: PathBuf, files: Vec<PathBuf> },
}

impl WeightSource {
    fn find(task: &dyn Task, path: &Path) -> Result<Self, InitError> {
        if let Some(found) = Store::at(path) {
            return Ok(Self::Checkpoint(Box::new(found)));
        }
        if path.is_dir()
            && let Some(found) = Store::new(path).complete()?.pop()
        {
            return Ok(Self::Checkpoint(Box::new(found)));
        }
        let files = task.weight_files(path);
        match files.is_empty() {
            true => Err(InitError::NothingThere { path: path.into() }),
            false => Ok(Self::Task { path: path.into(), files }),
        }
    }

    /// Names and shapes, as its files have them.
    fn headers(&self) -> Result<Vec<(String, Vec<usize>)>, InitError> {
        let files = match self {
            Self::Checkpoint(found) => vec![found.path.join(TRAINABLES)],
            Self::Task { files, .. } => files.clone(),
        };
        let mut headers = Vec::new();
        for path in files.into_iter().filter(|path| path.extension().is_none_or(|end| end != "json")) {
            let file = OpenFile::open(&path).and_then(TensorFile::new);
            let file = file.map_err(|source| InitError::Io { path, source })?;
            headers.extend(file.tensors().map(|(name, of)| (name, of.shape.clone())));
        }
        Ok(headers)
    }

    /// Adds what its files hold to a hash.
    fn hash(&self, hasher: &mut blake3::Hasher) -> Result<(), InitError> {
        let files = match self {
            Self::Checkpoint(found) => vec![found.verified(TRAINABLES)?],
            Self::Task { files, .. } => files.clone(),
        };
        for path in files {
            let entry = FileEntry::describe(&path).map_err(|source| InitError::Io { path, source })?;
            hasher.update(entry.blake3.as_bytes());
        }
        Ok(())
    }

    fn read_tensors(&self, task: &dyn Task, spec: &RunSpec) -> Result<Vec<StoredTensor>, InitError> {
        Ok(match self {
            Self::Checkpoint(found) => {
                let path = found.verified(TRAINABLES)?;
                read_tensors(&path).map_err(io_error("read", &path))?
            }
            Self::Task { path, .. } => task.read_weights(spec, path)?,
        })
    }
}

/// The digest of everything that a run starts from, for `train.init_digest`; none if it starts afresh.
pub fn content_digest(task: &dyn Task, spec: &RunSpec) -> Result<Option<String>, InitError> {
    let Some(init) = &spec.train.init_from else { return Ok(None) };
    let mut hasher = blake3::Hasher::new();
    for (group, path) in init.places() {
        hasher.update(format!("{}\n", group.unwrap_or_default()).as_bytes());
        WeightSource::find(task, Path::new(path))?.hash(&mut hasher)?;
    }
    Ok(Some(hasher.finalize().to_hex().to_string()))
}

/// Refuses a start that brings nothing of the group that stays as it is brought ([`Task::brought`]): by the
/// names of tensors, before a model is read or anything runs.
pub fn check_brought(task: &dyn Task, spec: &RunSpec) -> Result<(), InitError> {
    let (Some(init), Some(wanted)) = (&spec.train.init_from, task.brought(spec)) else { return Ok(()) };
    let mut without = Vec::new();
    for (group, path) in init.places() {
        if group.is_some_and(|group| group != wanted.0) {
            continue;
        }
        let there = WeightSource::find(task, Path::new(path))?.headers()?;
        if there.iter().any(|(name, _)| group_name(task, name) == wanted.0) {
            return Ok(());
        }
        without.push(format!("{wanted}: {path} has no tensor of this group"));
    }
    if without.is_empty() {
        without.push(format!("{wanted}: train.init_from names only other groups"));
    }
    Err(InitError::NotBrought { list: lines(&without) })
}

/// Refuses a start whose tensors have other sizes than `layout`'s, or mean something else here: by headers,
/// before a model is read or anything runs. What has no place here the workers refuse, who know each name.
pub fn check_start(task: &dyn Task, spec: &RunSpec, layout: &TrainableLayout) -> Result<(), InitError> {
    let Some(init) = &spec.train.init_from else { return Ok(()) };
    let params: BTreeMap<&str, &ParamSpec> =
        layout.whole().map(|param| (param.name.as_str(), param)).collect();
    for (group, path) in init.places() {
        let path = Path::new(path);
        let (mut misfits, mut groups) = (Vec::new(), Vec::new());
        for (name, shape) in WeightSource::find(task, path)?.headers()? {
            let param = params.get(name.as_str()).filter(|of| group.is_none_or(|group| group == of.group.0));
            let Some(param) = param else { continue };
            groups.push(param.group);
            if shape.iter().product::<usize>() != param.len() {
                misfits.push(format!("{name}: {shape:?} there, {:?} here", param.shape));
            }
        }
        if !misfits.is_empty() {
            let list = lines(&misfits);
            return Err(InitError::Misfits { path: path.into(), list, remedy: OTHER_SIZES });
        }
        groups.dedup();
        refuse_other_meaning(task, spec, path, &groups)?;
    }
    Ok(())
}

/// Puts the weights that a run starts from in the place of drawn ones; what was taken from where and what was
/// left, in words. Nothing if the run starts afresh.
pub(super) fn take(
    task: &dyn Task,
    spec: &RunSpec,
    layout: &TrainableLayout,
    values: &mut [f32],
) -> Result<Vec<String>, InitError> {
    let taken = fill(task, spec, layout, |param, tensor| {
        // Constants are there already, or are not asked for; of values that were not drawn none are.
        if param.range().end <= layout.len().min(values.len()) {
            values[param.range()].copy_from_slice(&tensor);
        }
    })?;
    Ok(if spec.train.init_from.is_some() { described(layout, &taken) } else { Vec::new() })
}

/// Puts what this run does not train behind the values of what it trains, which may be there already.
pub(super) fn bring(
    task: &dyn Task,
    spec: &RunSpec,
    layout: &TrainableLayout,
    values: &mut Vec<f32>,
) -> Result<(), InitError> {
    if layout.constants().is_empty() {
        return Ok(());
    }
    values.resize(layout.whole_len(), 0.0);
    let taken = fill(task, spec, layout, |param, tensor| {
        if param.range().start >= layout.len() {
            values[param.range()].copy_from_slice(&tensor);
        }
    })?;
    let missing: Vec<String> = layout
        .constants()
        .iter()
        .filter(|constant| !taken.contains_key(&constant.name))
        .map(|constant| format!("{}: {:?}", constant.name, constant.shape))
        .collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(InitError::NotBrought { list: lines(&missing) }),
    }
}

/// Hands every tensor that has a place here to `put`; where each came from, by its name.
fn fill(
    task: &dyn Task,
    spec: &RunSpec,
    layout: &TrainableLayout,
    mut put: impl FnMut(&ParamSpec, Vec<f32>),
) -> Result<BTreeMap<String, PathBuf>, InitError> {
    let mut taken = BTreeMap::new();
    let Some(init) = &spec.train.init_from else { return Ok(taken) };
    let found = content_digest(task, spec)?;
    if let (Some(found), Some(launched)) = (found, &spec.train.init_digest)
        && !found.eq_ignore_ascii_case(launched)
    {
        return Err(InitError::Changed { found, launched: launched.clone() });
    }
    for (group, path) in init.places() {
        let path = Path::new(path);
        pulse::allow(4 * layout.whole_len() as u64);
        let tensors = WeightSource::find(task, path)?.read_tensors(task, spec)?;
        let placed = TensorPlacement::new(task, layout, tensors, group);
        placed.refuse_misfits(path, group)?;
        refuse_other_meaning(task, spec, path, &placed.groups())?;
        for (param, tensor) in placed.fits {
            put(param, tensor.values);
            taken.insert(param.name.clone(), path.to_owned());
        }
    }
    Ok(taken)
}

/// Tensors of one place, by whether they have a place here.
struct TensorPlacement<'l> {
    fits: Vec<(&'l ParamSpec, StoredTensor)>,
    /// A line each.
    misfits: Vec<String>,
    /// The groups of those that misfit, where they are known.
    misfitting: Vec<Group>,
}

impl<'l> TensorPlacement<'l> {
    /// If only one group is wanted, tensors of others are passed over.
    fn new(
        task: &dyn Task,
        layout: &'l TrainableLayout,
        tensors: Vec<StoredTensor>,
        wanted: Option<&str>,
    ) -> Self {
        let params: BTreeMap<&str, &ParamSpec> =
            layout.whole().map(|param| (param.name.as_str(), param)).collect();
        let mut placed = Self { fits: Vec::new(), misfits: Vec::new(), misfitting: Vec::new() };
        for tensor in tensors {
            let StoredTensor { name, shape, .. } = &tensor;
            match params.get(name.as_str()).copied() {
                Some(param) if wanted.is_some_and(|group| group != param.group.0) => {}
                Some(param) if param.shape == *shape => placed.fits.push((param, tensor)),
                Some(param) => {
                    placed.misfits.push(format!("{name}: {shape:?} there, {:?} here", param.shape));
                }
                None if wanted.is_none_or(|group| group == group_name(task, name)) => {
                    placed.misfits.push(format!("{name}: {shape:?} there, no such tensor here"));
                    placed.misfitting.extend(task.group_of(name));
                }
                None => {}
            }
        }
        placed
    }

    fn groups(&self) -> Vec<Group> {
        let mut groups: Vec<Group> = self.fits.iter().map(|(param, _)| param.group).collect();
        groups.dedup();
        groups
    }

    fn refuse_misfits(&self, path: &Path, wanted: Option<&str>) -> Result<(), InitError> {
        let refused = |list, remedy| Err(InitError::Misfits { path: path.into(), list, remedy });
        if !self.misfits.is_empty() {
            let remedy = if self.misfitting.contains(&Group::BASE) {
                "list these modules of the pretrained model in model.train, or export a merged model (`cox export --merged`) and set model.path to it"
            } else if self.misfitting.contains(&Group::LORA) {
                "set lora.targets, lora.rank and lora.use_dora as in the run that trained the weights, or \
                 load only some groups: `train.init_from: {GROUP: PATH}`"
            } else {
                OTHER_SIZES
            };
            return refused(lines(&self.misfits), remedy);
        }
        if self.fits.is_empty() {
            let what = wanted.map_or("it has no tensor that this run trains".to_owned(), |group| {
                format!("it has no tensor of the group `{group}`")
            });
            return refused(lines(&[what]), "name another source, or remove this one from train.init_from");
        }
        Ok(())
    }
}

/// Shapes may fit and mean something else: that of the run that they come from is asked, where it says.
fn refuse_other_meaning(
    task: &dyn Task,
    spec: &RunSpec,
    path: &Path,
    groups: &[Group],
) -> Result<(), InitError> {
    // A run directory, results in it, a checkpoint below it.
    let there = path.ancestors().take(3).map(|dir| dir.join(SPEC_FILE)).find(|file| file.is_file());
    let text = there.and_then(|file| fs::read(file).ok());
    let Some(there) = text.and_then(|text| serde_json::from_slice::<RunSpec>(&text).ok()) else {
        return Ok(());
    };
    let problems = task.other_meaning(spec, &there, groups);
    match problems.is_empty() {
        true => Ok(()),
        false => Err(InitError::Misfits {
            path: path.into(),
            list: lines(&problems),
            remedy: "set these keys as in the run that trained the weights",
        }),
    }
}

/// The group of a tensor: what the task says, or what its name begins with.
fn group_name<'t>(task: &dyn Task, tensor: &'t str) -> &'t str {
    task.group_of(tensor).map_or_else(|| tensor.split('.').next().unwrap_or_default(), |of| of.0)
}

/// A line of each, cut off where a reader has seen enough.
fn lines(all: &[String]) -> String {
    let mut text = String::new();
    for line in all.iter().take(NAMED) {
        let _ = write!(text, "\n  {line}");
    }
    if all.len() > NAMED {
        let _ = write!(text, "\n  and {} more", all.len() - NAMED);
    }
    text
}

/// What each group starts from, a line for each.
fn described(layout: &TrainableLayout, taken: &BTreeMap<String, PathBuf>) -> Vec<String> {
    let line = |group: Group| {
        let members: Vec<_> = layout.params().iter().filter(|param| param.group == group).collect();
        let left: Vec<_> =
            members.iter().map(|param| &param.name).filter(|name| !taken.contains_key(*name)).collect();
        let places: std::collections::BTreeSet<_> = members
            .iter()
            .filter_map(|param| taken.get(&param.name))
            .map(|path| path.display().to_string())
            .collect();
        let places: Vec<_> = places.into_iter().collect();
        let (of, count) = (places.join(", "), members.len());
        match left.len() {
            0 => format!("{group}: all {count} tensors start from {of}"),
            all if all == count => format!("{group}: all {count} tensors start from their initial values"),
            some => format!(
                "{group}: {} tensors start from {of}, {some} from their initial values (the first: {})",
                count - some,
                left[0]
            ),
        }
    };
    let brought = layout.constants().iter().filter_map(|constant| taken.get(&constant.name));
    let brought: std::collections::BTreeSet<_> = brought.map(|path| path.display().to_string()).collect();
    let constants = brought.into_iter().map(|path| format!("frozen weights come from {path}"));
    layout.groups().into_iter().map(line).chain(constants).collect()
}
