//! A checkpoint's files of the optimizer, read: which values of which parameter are in which of them.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    ops::Range,
};

use safetensors::{Dtype, tensor::TensorInfo};

use super::error::StateError;
use crate::zero::{loss_scale::ScaleState, partition::intersect};
use coxswain_nn::{
    params::{ParamSpec, TrainableLayout},
    rules::{ParamPiece, StateBuffer, StateElement},
    tensor_file::{ReadAt, TensorFile},
};

/// In every file's metadata.
pub(super) const FORMAT: &str = "coxswain-optimizer-1";

/// One tensor of a file: values `range` of a parameter.
pub(super) struct SavedPiece<'a> {
    pub kind: usize,
    param: &'a ParamSpec,
    pub range: Range<usize>,
    /// Number of the file in the list given.
    file: usize,
    /// In that file.
    tensor: TensorInfo,
}

/// Values of a parameter that are read, and where the first of them goes in their buffer.
pub(super) struct WantedValues<'a> {
    pub param: &'a ParamSpec,
    pub values: Range<usize>,
    pub at: usize,
}

/// What of a kind of values these pieces of a part have.
pub(super) fn wanted<'a>(
    layout: &'a TrainableLayout,
    pieces: &[ParamPiece],
    kind: usize,
    buffer: &StateBuffer,
) -> Vec<WantedValues<'a>> {
    let of_piece = |piece: &ParamPiece| {
        let param = &layout.params()[piece.param];
        // The average has a value for each element.
        let at = piece.state.get(kind).unwrap_or(&piece.range).start;
        let values = buffer.values(param, &piece.elements);
        (!values.is_empty()).then_some(WantedValues { param, values, at })
    };
    pieces.iter().filter_map(of_piece).collect()
}

/// Reads what is wanted of a kind of values from the pieces that have it.
pub(super) fn read_to<'p, S: ReadAt>(
    files: &Files<S>,
    saved: impl Iterator<Item = &'p SavedPiece<'p>>,
    wanted: &[WantedValues<'_>],
    width: usize,
    bytes: &mut [u8],
) -> Result<(), StateError> {
    let wanted: HashMap<usize, &WantedValues<'_>> = wanted.iter().map(|it| (it.param.offset, it)).collect();
    for piece in saved.filter(|piece| !piece.range.is_empty()) {
        let Some(wanted) = wanted.get(&piece.param.offset) else { continue };
        let shared = intersect(&piece.range, &wanted.values);
        if shared.is_empty() {
            continue;
        }
        let at = width * (wanted.at + shared.start - wanted.values.start);
        let target = &mut bytes[at..at + width * shared.len()];
        let read = match &files[piece.file] {
            Some(file) => file.read(&piece.tensor, width * (shared.start - piece.range.start), target),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        read.map_err(|error| StateError::Unreadable { file: piece.file, detail: error.to_string() })?;
        if cfg!(target_endian = "big") {
            target.chunks_exact_mut(width).for_each(<[u8]>::reverse);
        }
    }
    Ok(())
}

/// All files of a list but those that are passed over, with their headers.
pub(super) type Files<S> = Vec<Option<TensorFile<S>>>;

pub(super) fn dtype(element: StateElement) -> Dtype {
    match element {
        StateElement::Float32 => Dtype::F32,
        StateElement::Uint8 => Dtype::U8,
    }
}

/// Every value that is wanted, parameter by parameter, must be in exactly one piece.
pub(super) fn check_coverage<'a>(
    kind: &'static str,
    wanted: &[WantedValues<'_>],
    pieces: impl Iterator<Item = &'a SavedPiece<'a>>,
) -> Result<(), StateError> {
    let mut by_param: BTreeMap<usize, Vec<Range<usize>>> = BTreeMap::new();
    for piece in pieces.filter(|piece| !piece.range.is_empty()) {
        by_param.entry(piece.param.offset).or_default().push(piece.range.clone());
    }
    for WantedValues { param, values: wanted, .. } in wanted {
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
        for range in ranges.iter().map(|range| intersect(range, wanted)).filter(|range| !range.is_empty()) {
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

/// How far the run of a state had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SavedProgress {
    pub steps: u64,
    /// Steps left out among those done.
    pub skipped: u64,
    /// None of a run that did not scale its loss.
    pub loss_scale: Option<ScaleState>,
}

/// How far the run had come; its files; what is in them.
pub(super) type State<'a, S> = (SavedProgress, Files<&'a S>, Vec<SavedPiece<'a>>);

/// What becomes of tensors of other kinds than those that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OtherKinds {
    /// They are an error.
    Refused,
    /// They are not looked at.
    PassedOver,
}

/// Reads the headers of all files that are not empty, which must be of one step.
pub(super) fn read_files<'a, S: ReadAt>(
    files: &'a [S],
    layout: &'a TrainableLayout,
    kinds: &[StateBuffer],
    others: OtherKinds,
) -> Result<State<'a, S>, StateError> {
    let params: HashMap<&str, &ParamSpec> = layout.params().iter().map(|p| (p.name.as_str(), p)).collect();
    let expected = ExpectedTensors { params, kinds, others };
    let (mut steps, mut read, mut pieces) = (None, Vec::new(), Vec::new());
    for (file, source) in files.iter().enumerate() {
        if source.size() == 0 {
            read.push(None);
            continue;
        }
        let opened = TensorFile::new(source);
        let opened = opened.map_err(|error| StateError::Unreadable { file, detail: error.to_string() })?;
        let found = read_header(file, &opened, &expected, &mut pieces)?;
        read.push(Some(opened));
        let first = *steps.get_or_insert(found);
        if found != first {
            return Err(StateError::Steps { file, expected: first.steps, found: found.steps });
        }
    }
    let none = || StateError::Unreadable { file: 0, detail: "no files were given".into() };
    Ok((steps.ok_or_else(none)?, read, pieces))
}

/// What tensors of a file may be.
pub(super) struct ExpectedTensors<'a, 'k> {
    params: HashMap<&'a str, &'a ParamSpec>,
    kinds: &'k [StateBuffer],
    others: OtherKinds,
}

/// Finds one file's tensors; returns how far its run had come.
pub(super) fn read_header<'a, S: ReadAt>(
    file: usize,
    opened: &TensorFile<S>,
    expected: &ExpectedTensors<'a, '_>,
    pieces: &mut Vec<SavedPiece<'a>>,
) -> Result<SavedProgress, StateError> {
    let unreadable = |detail: String| StateError::Unreadable { file, detail };
    let entry = |key: &str| opened.metadata().metadata().as_ref().and_then(|entry| entry.get(key));
    if entry("format").map(String::as_str) != Some(FORMAT) {
        return Err(unreadable(format!("its metadata has no \"format\": \"{FORMAT}\"")));
    }
    let number = |key: &str| entry(key).and_then(|number| number.parse::<u64>().ok());
    let (steps, skipped) = (number("steps"), number("skipped").unwrap_or(0));
    let mut tensors: Vec<_> = opened.tensors().collect();
    tensors.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (tensor, info) in tensors {
        let error = |detail: String| StateError::Tensor { file, tensor: tensor.clone(), detail };
        let Some((kind, name, begin)) = parse_name(&tensor, expected.kinds) else {
            match expected.others {
                OtherKinds::PassedOver => continue,
                OtherKinds::Refused => return Err(error("this run's optimizer keeps no such state".into())),
            }
        };
        let param = *expected.params.get(name).ok_or_else(|| {
            error(
                "this run trains no such parameter; was the checkpoint made with another configuration?"
                    .into(),
            )
        })?;
        let (buffer, bytes) = (&expected.kinds[kind], info.data_offsets.1 - info.data_offsets.0);
        let end = begin.saturating_add(bytes / buffer.element.bytes());
        let kept = buffer.values(param, &(0..param.len())).len();
        if info.dtype != dtype(buffer.element) || end > kept {
            return Err(error(format!(
                "has {:?} values {begin}..{end}, but this run has {kept} values of {:?}",
                info.dtype,
                dtype(buffer.element)
            )));
        }
        pieces.push(SavedPiece { kind, param, range: begin..end, file, tensor: info.clone() });
    }
    let steps = steps.filter(|steps| *steps >= skipped);
    let steps = steps.ok_or_else(|| unreadable("its metadata has no valid \"steps\"".into()))?;
    let small = |key: &str| number(key).and_then(|number| u32::try_from(number).ok());
    let loss_scale = match entry("loss_scale_exponent") {
        None => None,
        Some(_) => {
            let both = small("loss_scale_exponent").zip(small("loss_scale_good_steps"));
            let state = both.and_then(|(exponent, good)| ScaleState::checked(exponent, good));
            Some(state.ok_or_else(|| unreadable("its metadata has no valid loss scale".into()))?)
        }
    };
    Ok(SavedProgress { steps, skipped, loss_scale })
}

/// `<buffer>.<parameter>[<begin>..]` into its parts.
pub(super) fn parse_name<'t>(tensor: &'t str, kinds: &[StateBuffer]) -> Option<(usize, &'t str, usize)> {
    let (kind, rest) = tensor.split_once('.')?;
    let kind = kinds.iter().position(|buffer| buffer.name == kind)?;
    let (name, begin) = rest.strip_suffix("..]")?.rsplit_once('[')?;
    Some((kind, name, begin.parse().ok()?))
}
