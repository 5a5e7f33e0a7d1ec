//! The sample tables of one track (ISO/IEC 14496-12, 8.6 and 8.7): where each coded picture lies, from where
//! it can be decoded, and in which order pictures are shown.

use crate::boxes::{Boxes, Cursor, word};
use crate::error::{Fault, TO_PLAIN_MP4, container};
use crate::limits::{MAX_SAMPLE_BYTES, MAX_SAMPLES};

/// One coded picture, in decode order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Where its bytes begin in the file.
    pub offset: u64,
    /// How many there are.
    pub size: u32,
    /// The number of the sample where decoding begins for this one; its own for a keyframe.
    pub start: u32,
}

/// What the tables say, checked against the file's length.
#[derive(Debug)]
pub(crate) struct Tables {
    pub samples: Vec<Sample>,
    /// Composition time of each sample in ticks of the track.
    pub times: Vec<i64>,
    /// Which of the sample descriptions all samples use, from 0.
    pub description: usize,
}

impl Tables {
    pub fn read(stbl: &[u8], file_bytes: u64) -> Result<Self, Fault> {
        let sizes = sizes(stbl, file_bytes)?;
        if sizes.is_empty() {
            return Err(container("the video track has no samples"));
        }
        let (offsets, description) = offsets(stbl, &sizes, file_bytes)?;
        let times = times(stbl, sizes.len())?;
        let starts = starts(stbl, &times)?;
        let samples = (sizes.iter().zip(offsets).zip(starts))
            .map(|((&size, offset), start)| Sample { offset, size, start })
            .collect();
        Ok(Self { samples, times, description })
    }
}

/// Bytes of each sample. Their sum is at most the file, whose length may be a hole's: so there is a limit,
/// too.
fn sizes(stbl: &[u8], file_bytes: u64) -> Result<Vec<u32>, Fault> {
    let Some(stsz) = Boxes::find(stbl, b"stsz")? else {
        let what = "an mp4 with a compact size table (`stz2`)".to_owned();
        return Err(Fault::Refused { what, command: TO_PLAIN_MP4 });
    };
    let mut cursor = Cursor::new(stsz);
    cursor.version()?;
    let (each, sizes) = match cursor.u32()? {
        0 => (0, cursor.table::<4>()?),
        each => (each, [].as_slice()),
    };
    let count = if each == 0 { sizes.len() } else { cursor.u32()? as usize };
    if count > MAX_SAMPLES {
        let (value, limit) = (count as u64, MAX_SAMPLES as u64);
        return Err(Fault::Limit { what: "the number of samples", value, limit });
    }
    if u64::from(each).saturating_mul(count as u64) > file_bytes {
        return Err(container(format!("{count} samples do not fit into a file of {file_bytes} bytes")));
    }
    let sizes: Vec<u32> = if each == 0 {
        sizes.iter().map(|size| u32::from_be_bytes(*size)).collect()
    } else {
        vec![each; count]
    };
    if sizes.iter().map(|&size| u64::from(size)).sum::<u64>() > file_bytes {
        return Err(container("the samples are longer than the file: it is truncated"));
    }
    match sizes.iter().position(|&size| size == 0) {
        Some(empty) => Err(container(format!("sample {empty} is empty"))),
        None => match sizes.iter().max() {
            Some(&size) if size > MAX_SAMPLE_BYTES => Err(Fault::Limit {
                what: "bytes per coded picture",
                value: size.into(),
                limit: MAX_SAMPLE_BYTES.into(),
            }),
            _ => Ok(sizes),
        },
    }
}

/// Where each sample begins, and the sample description they share.
fn offsets(stbl: &[u8], sizes: &[u32], file_bytes: u64) -> Result<(Vec<u64>, usize), Fault> {
    let chunks: Vec<u64> = if let Some(stco) = Boxes::find(stbl, b"stco")? {
        table_of::<4>(stco)?.iter().map(|offset| u32::from_be_bytes(*offset).into()).collect()
    } else {
        table_of::<8>(Boxes::need(stbl, b"co64")?)?.iter().map(|offset| u64::from_be_bytes(*offset)).collect()
    };
    let runs = table_of::<12>(Boxes::need(stbl, b"stsc")?)?;
    let description = runs.first().map_or(0, |run| word(run, 2));
    let mut offsets = Vec::with_capacity(sizes.len());
    for (n, run) in runs.iter().enumerate() {
        let (first, samples) = (word(run, 0) as usize, word(run, 1));
        let end = runs.get(n + 1).map_or(chunks.len().saturating_add(1), |next| word(next, 0) as usize);
        if first == 0 || end <= first || end - 1 > chunks.len() || (n == 0 && first != 1) {
            return Err(container(format!("the table of chunks is out of order at entry {n}")));
        }
        if word(run, 2) != description {
            let what = "an mp4 with several sample descriptions in one track".to_owned();
            return Err(Fault::Refused { what, command: crate::error::TO_H264 });
        }
        for &chunk in &chunks[first - 1..end - 1] {
            let mut at = chunk;
            for &size in sizes.iter().skip(offsets.len()).take(samples as usize) {
                let sample = offsets.len();
                offsets.push(at);
                at = at.saturating_add(size.into());
                if at > file_bytes {
                    return Err(container(format!(
                        "sample {sample} ends at byte {at}, but the truncated file has {file_bytes} bytes"
                    )));
                }
            }
        }
    }
    if offsets.len() < sizes.len() {
        return Err(container(format!(
            "{} of {} samples are in no chunk",
            sizes.len() - offsets.len(),
            sizes.len()
        )));
    }
    Ok((offsets, (description as usize).saturating_sub(1)))
}

/// When each sample is shown: decode times plus composition offsets.
fn times(stbl: &[u8], samples: usize) -> Result<Vec<i64>, Fault> {
    let mut times = Vec::with_capacity(samples);
    let mut now = 0_i64;
    for entry in table_of::<8>(Boxes::need(stbl, b"stts")?)? {
        let step = i64::from(word(entry, 1));
        for _ in 0..(word(entry, 0) as usize).min(samples - times.len()) {
            times.push(now);
            now += step;
        }
    }
    if times.len() < samples {
        return Err(container(format!("{} of {samples} samples have no timestamp", samples - times.len())));
    }
    if let Some(ctts) = Boxes::find(stbl, b"ctts")? {
        let mut rest = times.as_mut_slice();
        for entry in table_of::<8>(ctts)? {
            // Version 0 says unsigned, but files with negative offsets are written as it; FFmpeg reads both
            // as signed.
            let offset = i64::from(word(entry, 1).cast_signed());
            let (these, later) = rest.split_at_mut((word(entry, 0) as usize).min(rest.len()));
            these.iter_mut().for_each(|time| *time += offset);
            rest = later;
        }
    }
    Ok(times)
}

/// From where each sample can be decoded: the last keyframe before it that is also shown before it. Pictures
/// that follow a keyframe in the file but are shown before it ("open" groups) refer to the group before.
fn starts(stbl: &[u8], times: &[i64]) -> Result<Vec<u32>, Fault> {
    let Some(stss) = Boxes::find(stbl, b"stss")? else {
        return Ok((0..times.len() as u32).collect());
    };
    let mut keys = table_of::<4>(stss)?.iter().map(|key| u32::from_be_bytes(*key)).peekable();
    if keys.peek() != Some(&1) {
        return Err(container("the first sample is not a keyframe"));
    }
    let mut starts: Vec<u32> = Vec::with_capacity(times.len());
    let mut key = 0;
    for sample in 0..times.len() as u32 {
        if keys.peek() == Some(&(sample + 1)) {
            key = sample;
            keys.next();
        }
        let leads = times[sample as usize] < times[key as usize] && key > 0;
        starts.push(if leads { starts[key as usize - 1] } else { key });
    }
    match keys.next() {
        Some(key) => Err(container(format!("the table of keyframes is out of order at sample {key}"))),
        None => Ok(starts),
    }
}

fn table_of<const N: usize>(body: &[u8]) -> Result<&[[u8; N]], Fault> {
    let mut cursor = Cursor::new(body);
    cursor.version()?;
    cursor.table()
}

/// One entry of an edit list, its duration in ticks of the track.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Edit {
    /// `None`: to the end of the track.
    pub duration: Option<i64>,
    /// The composition time it begins at; negative: nothing is shown.
    pub media_time: i64,
}

/// Reads `edts/elst`. Durations are in ticks of the movie and are turned to the track's as FFmpeg does.
pub(crate) fn edits(elst: &[u8], movie_timescale: u32, timescale: u32) -> Result<Vec<Edit>, Fault> {
    let mut cursor = Cursor::new(elst);
    let version = cursor.version()?;
    let mut edits = Vec::new();
    let mut push = |duration: u64, media_time: i64| -> Result<(), Fault> {
        let movie = u128::from(movie_timescale.max(1));
        let ticks = (u128::from(duration) * u128::from(timescale) + movie / 2) / movie;
        let ticks = i64::try_from(ticks).map_err(|_| container("an edit is too long"))?;
        edits.push(Edit { duration: (duration > 0).then_some(ticks), media_time });
        Ok(())
    };
    if version == 1 {
        for entry in cursor.table::<20>()? {
            let high = |n| u64::from(word(entry, n)) << 32 | u64::from(word(entry, n + 1));
            push(high(0), high(2).cast_signed())?;
        }
    } else {
        for entry in cursor.table::<12>()? {
            push(word(entry, 0).into(), word(entry, 1).cast_signed().into())?;
        }
    }
    Ok(edits)
}

/// What is shown, in order: the sample of each frame and its time in ticks. Without edits, everything.
pub(crate) fn presentation(times: &[i64], edits: &[Edit]) -> Result<(Vec<u32>, Vec<i64>), Fault> {
    let mut shown: Vec<u32> = (0..times.len() as u32).collect();
    shown.sort_by_key(|&sample| times[sample as usize]);
    if edits.is_empty() {
        let ticks = shown.iter().map(|&sample| times[sample as usize]).collect();
        return Ok((shown, ticks));
    }
    let (mut order, mut ticks, mut begin) = (Vec::new(), Vec::new(), 0_i64);
    for edit in edits {
        if edit.media_time >= 0 {
            let end = edit.duration.map_or(i64::MAX, |duration| edit.media_time.saturating_add(duration));
            let from = shown.partition_point(|&sample| times[sample as usize] < edit.media_time);
            let until = shown.partition_point(|&sample| times[sample as usize] < end).max(from);
            if order.len() + (until - from) > times.len() {
                let what = "an mp4 whose edit list shows a part twice".to_owned();
                return Err(Fault::Refused { what, command: crate::error::TO_H264 });
            }
            order.extend_from_slice(&shown[from..until]);
            let at = |&sample: &u32| begin.saturating_add(times[sample as usize] - edit.media_time);
            ticks.extend(shown[from..until].iter().map(at));
        }
        begin = begin.saturating_add(edit.duration.unwrap_or(0));
    }
    if order.is_empty() {
        return Err(container("the edit list hides every frame"));
    }
    Ok((order, ticks))
}
