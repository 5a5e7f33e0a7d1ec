//! Inputs that are worth changing: a target's samples, what was kept in `corpus/`, and in a guided search
//! each input that reached what none before it did.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::{
    coverage::{Coverage, Novelty},
    mutations::Inputs,
};

/// A search goes on with so many inputs.
const INPUTS: usize = 4096;
/// So much longer than the longest sample an input may become, change by change.
const GROWN: usize = 1 << 9;
/// Bytes of a target's file in `corpus/`: all of them travel with the tree.
const KEPT: usize = 12 << 10;

pub(crate) struct Corpus {
    file_name: String,
    inputs: Vec<Vec<u8>>,
    /// So many of `inputs` are the target's samples.
    samples: usize,
    /// So many were there before the search: those, and what was kept.
    known: usize,
    /// What is longer than this, or was read more slowly, is not gone on from: of slow ones come slower ones.
    longest: usize,
    slowest: Duration,
    coverage: Option<Coverage>,
    guided: Option<GuidedSearch>,
}

/// Where a guided search leaves what is to be kept, and the input that it is at.
struct GuidedSearch {
    dir: PathBuf,
    input: File,
}

impl GuidedSearch {
    fn of(file_name: &str) -> Option<Self> {
        let dir = PathBuf::from(std::env::var_os("COX_FUZZ_GUIDED")?);
        let input = File::create(dir.join(input_name(file_name))).expect("a file for the input");
        Some(Self { dir, input })
    }

    /// What ends the process leaves nothing else behind. The file stays open: one that is cut and closed anew
    /// for each input is written to the disk each time.
    fn note(&self, input: &[u8]) -> io::Result<()> {
        self.input.write_all_at(input, 0)?;
        self.input.set_len(input.len() as u64)
    }
}

fn input_name(file_name: &str) -> String {
    format!("{file_name}.input")
}

fn kept_name(file_name: &str) -> String {
    format!("{file_name}.inputs")
}

impl Corpus {
    pub(crate) fn new(name: &str, samples: &[Vec<u8>]) -> Self {
        let file_name = name.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-");
        let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(kept_name(&file_name));
        let kept = fs::read(kept).map(|bytes| unpack(&bytes)).unwrap_or_default();
        let longest = samples.iter().map(Vec::len).max().unwrap_or(0) + GROWN;
        let inputs: Vec<_> = samples.iter().cloned().chain(kept).collect();
        let known = inputs.len();
        let guided = GuidedSearch::of(&file_name);
        let (slowest, coverage) = (Duration::MAX, Coverage::of_this_program());
        Self { file_name, inputs, samples: samples.len(), known, longest, slowest, coverage, guided }
    }

    pub(crate) fn inputs(&self) -> Inputs<'_> {
        let (samples, found) = self.inputs.split_at(self.samples);
        Inputs { samples, found }
    }

    /// What alone is to be tried where one input is: nothing, if it is another target's.
    pub(crate) fn replayed(&self) -> Option<Vec<u8>> {
        let file = PathBuf::from(std::env::var_os("COX_FUZZ_REPLAY")?);
        let own = file.file_name().is_some_and(|name| name == input_name(&self.file_name).as_str());
        Some(if own { fs::read(file).expect("the input to be tried again") } else { Vec::new() })
    }

    /// Has `attack` try an input, which is kept in memory if the search is guided and it reached something.
    pub(crate) fn attempt(&mut self, input: Vec<u8>, attack: impl Fn(&[u8])) {
        if let Some(guided) = &self.guided {
            guided.note(&input).expect("a file for the input");
        }
        let began = Instant::now();
        let reached = reached(&mut self.coverage, &input, attack);
        let is_quick = input.len() <= self.longest && began.elapsed() <= self.slowest;
        let wanted = self.guided.is_some() && is_quick && self.inputs.len() < INPUTS;
        if wanted && reached.is_some_and(|new| new.edges + new.counts > 0) {
            self.inputs.push(input);
        }
    }

    /// Has `attack` try what was there before the search, so that what this reaches is nothing new.
    pub(crate) fn attempt_known(&mut self, attack: impl Fn(&[u8])) {
        let mut slowest = Duration::ZERO;
        for input in self.inputs.clone() {
            let began = Instant::now();
            self.attempt(input, &attack);
            slowest = slowest.max(began.elapsed());
        }
        self.slowest = 2 * slowest;
        self.inputs.truncate(self.known);
    }

    /// What the search came to, in words.
    pub(crate) fn reach(&self) -> String {
        let Some(coverage) = &self.coverage else { return String::new() };
        format!(", {} edges, {} inputs found", coverage.edges(), self.inputs.len() - self.known)
    }

    /// Writes the few shortest inputs beside the samples that together reach what the search did, as far as
    /// there is room.
    pub(crate) fn keep(&self, attack: impl Fn(&[u8])) -> io::Result<()> {
        let (Some(guided), mut coverage) = (&self.guided, Coverage::of_this_program()) else { return Ok(()) };
        let (samples, found) = self.inputs.split_at(self.samples);
        for sample in samples {
            reached(&mut coverage, sample, &attack);
        }
        let mut found: Vec<_> = found.iter().collect();
        found.sort_by_key(|input| input.len());
        let mut room = KEPT;
        found.retain(|input| {
            let packed = 4 + input.len();
            let adds =
                packed <= room && reached(&mut coverage, input, &attack).is_some_and(|new| new.edges > 0);
            room -= if adds { packed } else { 0 };
            adds
        });
        fs::write(guided.dir.join(kept_name(&self.file_name)), pack(&found))
    }
}

fn reached(coverage: &mut Option<Coverage>, input: &[u8], attack: impl Fn(&[u8])) -> Option<Novelty> {
    if let Some(coverage) = coverage {
        coverage.begin();
    }
    attack(input);
    coverage.as_mut().map(Coverage::look)
}

/// Each input behind its length in four bytes.
fn pack(inputs: &[&Vec<u8>]) -> Vec<u8> {
    let packed = inputs.iter().map(|input| [&(input.len() as u32).to_le_bytes()[..], input].concat());
    packed.collect::<Vec<_>>().concat()
}

fn unpack(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut inputs = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let (input, rest) = rest.split_at(u32::from_le_bytes(*length) as usize);
        inputs.push(input.to_vec());
        bytes = rest;
    }
    inputs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_found_again() {
        let inputs = [vec![1, 2, 3], Vec::new(), vec![4; 300]];
        assert_eq!(unpack(&pack(&inputs.iter().collect::<Vec<_>>())), inputs);
    }
}
