//! The optimizer's state as bytes: one safetensors file per rank, by parameter name and offset.
//!
//! ```text
//! tensors    exp_avg.<parameter>[<first element>..]     fp32, the elements of that parameter in this rank's
//!                                                       part
//!            exp_avg_sq.<parameter>[<first element>..]
//!            ema.<parameter>[<first element>..]        the average of the weights, if the run keeps one
//! metadata   format, steps, rank, world; skipped, if steps were left out
//! ```
//!
//! Names and offsets, not positions in the flat parameter buffer: all files of a checkpoint together can be
//! read at any world size, and into a layout whose order has changed. Weights are not in here; the checkpoint
//! has them in full, in fp32.
//!
//! Reading checks that every element of this rank's part is there exactly once, before anything is changed.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Write},
    ops::Range,
};

use safetensors::{Dtype, tensor::TensorInfo};
use serde_json::{Map, Value, json};

use super::{loss_scale::ScaleState, optimizer::ShardedAdamW, partition::intersect, soundness};
use coxswain_nn::{
    kernels::flat::Flat,
    params::{ParamSpec, TrainableLayout},
    tensor_file::{ReadAt, TensorFile},
};

/// In every file's metadata.
const FORMAT: &str = "coxswain-optimizer-1";
/// In the order of `ShardedAdamW::buffers`.
pub(super) const KINDS: [&str; 3] = ["exp_avg", "exp_avg_sq", "ema"];
/// The place among them of what a run may do without.
const AVERAGE: usize = 2;
/// Elements read at once: what of moments in a device's memory is in the host's while they are written.
const PIECE: usize = 16 << 20;

/// Why a saved state cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Not a safetensors file, or a damaged one.
    #[error("optimizer file {file}: {detail}")]
    Unreadable {
        /// Its number in the list given.
        file: usize,
        /// What is wrong.
        detail: String,
    },
    /// A tensor that this run has no place for.
    #[error("optimizer file {file}: tensor {tensor}: {detail}")]
    Tensor {
        /// Its number in the list given.
        file: usize,
        /// Its name.
        tensor: String,
        /// What does not fit.
        detail: String,
    },
    /// Files of different steps.
    #[error(
        "optimizer file {file} is of step {found}, those before it of step {expected}: they are not of one checkpoint"
    )]
    Steps {
        /// Its number in the list given.
        file: usize,
        /// Of the first file.
        expected: u64,
        /// Of this one.
        found: u64,
    },
    /// Elements that no file, or more than one, has.
    #[error(
        "{kind} of {parameter}: elements {begin}..{end} are in {copies} of the files; are all files of the checkpoint there, each once?"
    )]
    Coverage {
        /// `exp_avg`, `exp_avg_sq` or `ema`.
        kind: &'static str,
        /// Whose.
        parameter: String,
        /// First such element of the parameter.
        begin: usize,
        /// One past the last.
        end: usize,
        /// 0 or 2.
        copies: usize,
    },
}

impl StateError {
    /// The number, in the list given, of the file that is to blame; none if all are.
    pub fn file(&self) -> Option<usize> {
        match self {
            Self::Unreadable { file, .. } | Self::Tensor { file, .. } | Self::Steps { file, .. } => {
                Some(*file)
            }
            Self::Coverage { .. } => None,
        }
    }
}

/// One tensor of a file: elements `range` of a parameter.
struct Piece<'a> {
    kind: usize,
    param: &'a ParamSpec,
    range: Range<usize>,
    /// Number of the file in the list given.
    file: usize,
    /// In that file.
    tensor: TensorInfo,
}

impl Piece<'_> {
    /// Reads what of it is in the part `own` of the flat parameter buffer, whose elements are `moments`.
    fn read_to<S: ReadAt>(
        &self,
        files: &Files<S>,
        moments: &mut [f32],
        own: &Range<usize>,
    ) -> Result<(), StateError> {
        let begin = self.param.offset + self.range.start;
        let wanted = intersect(own, &(begin..self.param.offset + self.range.end));
        if wanted.is_empty() {
            return Ok(());
        }
        let target = &mut moments[wanted.start - own.start..wanted.end - own.start];
        let read = match &files[self.file] {
            Some(file) => {
                file.read(&self.tensor, 4 * (wanted.start - begin), bytemuck::cast_slice_mut(target))
            }
            None => Err(io::ErrorKind::NotFound.into()),
        };
        read.map_err(|error| StateError::Unreadable { file: self.file, detail: error.to_string() })?;
        if cfg!(target_endian = "big") {
            target.iter_mut().for_each(|value| *value = f32::from_bits(value.to_bits().swap_bytes()));
        }
        Ok(())
    }
}

/// All files of a list but those that are passed over, with their headers.
type Files<S> = Vec<Option<TensorFile<S>>>;

impl<F: Flat> ShardedAdamW<F> {
    /// This rank's state as a safetensors file.
    pub fn export(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.exp_avg.len() * 12 + (16 << 10));
        self.write_to(&mut bytes).expect("a vector takes everything");
        bytes
    }

    /// Writes what [`ShardedAdamW::export`] returns, without a copy of the moments; returns the bytes
    /// written. Values that nothing can go on from are refused as invalid data.
    pub fn write_to(&self, out: &mut dyn Write) -> io::Result<u64> {
        let header = self.header();
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        let mut elements = 0;
        for (kind, moments) in KINDS.into_iter().zip(self.buffers()) {
            elements += moments.len() as u64;
            for start in (0..moments.len()).step_by(PIECE) {
                let piece = moments.read(start..(start + PIECE).min(moments.len()));
                soundness::check(kind, &piece)?;
                if cfg!(target_endian = "little") {
                    out.write_all(bytemuck::cast_slice(&piece))?;
                } else {
                    piece.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))?;
                }
            }
        }
        Ok(8 + header.len() as u64 + 4 * elements)
    }

    /// Takes over the state of a checkpoint, given its ranks' files; they may come from any world size. Empty
    /// ones are passed over: files that have nothing of this rank's part need not be there. What is wanted is
    /// read into its place, and nothing else. On an error nothing has changed, unless a file could not be
    /// read any more. Returns whether everything is there that this run keeps: files of a
    /// run that kept no average of its weights have none, and the average here is as it was.
    pub fn import<S: ReadAt>(&mut self, files: &[S]) -> Result<bool, StateError> {
        let (reached, files, pieces) = read_files(files, &self.layout)?;
        let averaged = pieces.iter().any(|piece| piece.kind == AVERAGE);
        let kept = self.buffers().count();
        let there = if averaged { kept } else { kept.min(AVERAGE) };
        for (kind, name) in KINDS.into_iter().enumerate().take(there) {
            check_coverage(name, self.own_pieces(), pieces.iter().filter(|piece| piece.kind == kind))?;
        }
        let own = self.partition.own();
        // Field by field: the pieces are of the layout beside them.
        let average = self.average.as_mut().map(|of| &mut of.values);
        let buffers = [&mut self.exp_avg, &mut self.exp_avg_sq].into_iter().chain(average);
        for (kind, moments) in buffers.enumerate().take(there) {
            let mut pieces = pieces.iter().filter(|piece| piece.kind == kind);
            moments.edit(|moments| pieces.try_for_each(|piece| piece.read_to(&files, moments, &own)))?;
        }
        (self.steps, self.skipped) = (reached.steps, reached.skipped);
        if let (Some(scaler), Some(state)) = (&mut self.loss_scaler, reached.loss_scale) {
            scaler.restore(state);
        }
        Ok(there == kept)
    }

    /// The average, if one is kept, begins with these weights, full length.
    pub(crate) fn begin_average(&mut self, weights: &[f32]) {
        let part = self.partition.own();
        let begin = |values: &mut [f32]| values.copy_from_slice(&weights[part]);
        if let Some(average) = &mut self.average {
            average.values.edit(begin);
        }
    }

    /// Parameters and the elements of each that are this rank's.
    pub(super) fn own_pieces(&self) -> impl Iterator<Item = (&ParamSpec, Range<usize>)> {
        let own = self.partition.own();
        self.layout.params().iter().filter_map(move |param| {
            let range = intersect(&own, &(param.offset..param.offset + param.len()));
            (!range.is_empty()).then(|| (param, range.start - param.offset..range.end - param.offset))
        })
    }

    /// The JSON header of the format, padded so that the data begins at a multiple of eight.
    fn header(&self) -> Vec<u8> {
        let mut header = Map::new();
        let mut metadata = json!({
            "format": FORMAT,
            "steps": self.steps.to_string(),
            "rank": self.partition.rank().to_string(),
            "world": self.partition.world().to_string(),
        });
        if self.skipped > 0 {
            metadata["skipped"] = json!(self.skipped.to_string());
        }
        if let Some(ScaleState { exponent, good }) = self.loss_scaler.map(|scaler| scaler.state()) {
            metadata["loss_scale_exponent"] = json!(exponent.to_string());
            metadata["loss_scale_good_steps"] = json!(good.to_string());
        }
        header.insert("__metadata__".into(), metadata);
        let mut offset = 0;
        for kind in KINDS.into_iter().take(self.buffers().count()) {
            for (param, range) in self.own_pieces() {
                let end = offset + 4 * range.len();
                let name = format!("{kind}.{}[{}..]", param.name, range.start);
                let entry = json!({"dtype": "F32", "shape": [range.len()], "data_offsets": [offset, end]});
                header.insert(name, entry);
                offset = end;
            }
        }
        let mut bytes = Value::Object(header).to_string().into_bytes();
        bytes.resize(bytes.len().next_multiple_of(8), b' ');
        bytes
    }
}

/// Every element that is wanted, parameter by parameter, must be in exactly one piece.
fn check_coverage<'a>(
    kind: &'static str,
    wanted: impl Iterator<Item = (&'a ParamSpec, Range<usize>)>,
    pieces: impl Iterator<Item = &'a Piece<'a>>,
) -> Result<(), StateError> {
    let mut by_param: BTreeMap<usize, Vec<Range<usize>>> = BTreeMap::new();
    for piece in pieces.filter(|piece| !piece.range.is_empty()) {
        by_param.entry(piece.param.offset).or_default().push(piece.range.clone());
    }
    for (param, wanted) in wanted {
        let error = |begin, end, copies| StateError::Coverage {
            kind,
            parameter: param.name.clone(),
            begin,
            end,
            copies,
        };
        let mut ranges = by_param.remove(&param.offset).unwrap_or_default();
        ranges.sort_by_key(|range| range.start);
        let mut next = wanted.start;
        for range in ranges.iter().map(|range| intersect(range, &wanted)).filter(|range| !range.is_empty()) {
            if range.start > next {
                return Err(error(next, range.start, 0));
            }
            if range.start < next {
                return Err(error(range.start, next.min(range.end), 2));
            }
            next = range.end;
        }
        if next < wanted.end {
            return Err(error(next, wanted.end, 0));
        }
    }
    Ok(())
}

/// The average of all weights, from all files of a checkpoint; none if its run kept none.
pub fn read_average<S: ReadAt>(
    files: &[S],
    layout: &TrainableLayout,
) -> Result<Option<Vec<f32>>, StateError> {
    // An optimizer of one rank would hold the moments, too.
    let (_, files, mut pieces) = read_files(files, layout)?;
    pieces.retain(|piece| piece.kind == AVERAGE);
    if pieces.is_empty() {
        return Ok(None);
    }
    let whole = layout.params().iter().map(|param| (param, 0..param.len()));
    check_coverage(KINDS[AVERAGE], whole, pieces.iter())?;
    let mut average = vec![0.0; layout.len()];
    pieces.iter().try_for_each(|piece| piece.read_to(&files, &mut average, &(0..layout.len())))?;
    Ok(Some(average))
}

/// How far the run of a state had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reached {
    steps: u64,
    /// Of these, steps that were left out.
    skipped: u64,
    /// None of a run that did not scale its loss.
    loss_scale: Option<ScaleState>,
}

/// How far the run had come; its files; what is in them.
type State<'a, S> = (Reached, Files<&'a S>, Vec<Piece<'a>>);

/// Reads the headers of all files that are not empty, which must be of one step.
fn read_files<'a, S: ReadAt>(
    files: &'a [S],
    layout: &'a TrainableLayout,
) -> Result<State<'a, S>, StateError> {
    let (mut steps, mut read, mut pieces) = (None, Vec::new(), Vec::new());
    for (file, source) in files.iter().enumerate() {
        if source.size() == 0 {
            read.push(None);
            continue;
        }
        let opened = TensorFile::new(source);
        let opened = opened.map_err(|error| StateError::Unreadable { file, detail: error.to_string() })?;
        let found = read_header(file, &opened, layout, &mut pieces)?;
        read.push(Some(opened));
        let expected = *steps.get_or_insert(found);
        if found != expected {
            return Err(StateError::Steps { file, expected: expected.steps, found: found.steps });
        }
    }
    let none = || StateError::Unreadable { file: 0, detail: "no files were given".into() };
    Ok((steps.ok_or_else(none)?, read, pieces))
}

/// Finds one file's tensors; returns how far its run had come.
fn read_header<'a, S: ReadAt>(
    file: usize,
    opened: &TensorFile<S>,
    layout: &'a TrainableLayout,
    pieces: &mut Vec<Piece<'a>>,
) -> Result<Reached, StateError> {
    let unreadable = |detail: String| StateError::Unreadable { file, detail };
    let entry = |key: &str| opened.metadata().metadata().as_ref().and_then(|entry| entry.get(key));
    if entry("format").map(String::as_str) != Some(FORMAT) {
        return Err(unreadable(format!("its metadata has no \"format\": \"{FORMAT}\"")));
    }
    let number = |key: &str| entry(key).and_then(|number| number.parse::<u64>().ok());
    let (steps, skipped) = (number("steps"), number("skipped").unwrap_or(0));
    let params: HashMap<&str, &ParamSpec> = layout.params().iter().map(|p| (p.name.as_str(), p)).collect();
    let mut tensors: Vec<_> = opened.tensors().collect();
    tensors.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (tensor, info) in tensors {
        let error = |detail: String| StateError::Tensor { file, tensor: tensor.clone(), detail };
        let (kind, name, begin) = parse_name(&tensor).ok_or_else(|| error("not a name of ours".into()))?;
        let param = *params.get(name).ok_or_else(|| {
            error(
                "this run trains no such parameter; was the checkpoint made with another configuration?"
                    .into(),
            )
        })?;
        let end = begin.saturating_add((info.data_offsets.1 - info.data_offsets.0) / 4);
        if info.dtype != Dtype::F32 || end > param.len() {
            let found = (info.dtype, begin, end, param.len());
            return Err(error(format!(
                "{:?} elements {}..{} of a parameter of {} fp32",
                found.0, found.1, found.2, found.3
            )));
        }
        pieces.push(Piece { kind, param, range: begin..end, file, tensor: info.clone() });
    }
    let steps = steps.filter(|steps| *steps >= skipped);
    let steps = steps.ok_or_else(|| unreadable("its metadata has no \"steps\" that could be".into()))?;
    let small = |key: &str| number(key).and_then(|number| u32::try_from(number).ok());
    let loss_scale = match entry("loss_scale_exponent") {
        None => None,
        Some(_) => {
            let both = small("loss_scale_exponent").zip(small("loss_scale_good_steps"));
            let state = both.and_then(|(exponent, good)| ScaleState::checked(exponent, good));
            Some(state.ok_or_else(|| unreadable("its metadata has no loss scale that could be".into()))?)
        }
    };
    Ok(Reached { steps, skipped, loss_scale })
}

/// `exp_avg.<parameter>[<begin>..]` into its parts.
fn parse_name(tensor: &str) -> Option<(usize, &str, usize)> {
    let (kind, rest) = tensor.split_once('.')?;
    let kind = KINDS.iter().position(|k| *k == kind)?;
    let (name, begin) = rest.strip_suffix("..]")?.rsplit_once('[')?;
    Some((kind, name, begin.parse().ok()?))
}
