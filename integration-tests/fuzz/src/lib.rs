//! Hostile bytes for what reads bytes of others.
//!
//! A target is a test beside the reader that it attacks. It names samples, which are changed at random, and a
//! reader, which may refuse whatever it is given and may neither panic nor take more memory than a bound that
//! grows with what it was given.
//!
//! ```no_run
//! # fn read(bytes: &[u8]) -> Result<(), String> { Ok(()) }
//! coxswain_fuzz::Target::new("wav", [b"RIFF....WAVE".to_vec()]).check(|bytes| drop(read(bytes)));
//! ```
//!
//! Draws depend on the target's name and `COX_FUZZ_SEED` alone, so that a change gets the same answer twice;
//! `COX_FUZZ_SECONDS=600` tries for so long instead of a fixed number of times. What once failed is put among
//! the samples.
//!
//! In a program that counts its edges, `COX_FUZZ_GUIDED=DIR` guides the search: an input that reached new
//! ones is changed in its turn. `COX_FUZZ_REPLAY=FILE` tries one input that such a search has left in its
//! directory. The script `long` does all of this.

mod allocations;
mod corpus;
mod coverage;
mod mutations;

use std::{
    fmt::Write as _,
    panic::{self, AssertUnwindSafe},
    thread,
    time::{Duration, Instant},
};

use corpus::Corpus;
use mutations::Mutator;

/// Tries of a target where no time is given: all targets together take about a minute.
const TRIES: usize = 2_000;
/// A reader that twice takes longer than this for one input hangs, whatever it is doing.
const HANGS: Duration = Duration::from_secs(5);

/// A reader under attack.
pub struct Target {
    name: &'static str,
    samples: Vec<Vec<u8>>,
    fixed: usize,
    times: usize,
    tries: usize,
    other_threads: bool,
    mend: fn(&mut [u8]),
}

impl Target {
    /// A target with bytes that its reader takes, in a few forms: what is tried are changes of these.
    pub fn new(name: &'static str, samples: impl IntoIterator<Item = Vec<u8>>) -> Self {
        let samples: Vec<_> = samples.into_iter().collect();
        assert!(!samples.is_empty(), "{name}: nothing to change");
        Self { name, samples, fixed: 1 << 20, times: 16, tries: TRIES, other_threads: false, mend: |_| () }
    }

    /// Most bytes that the reader may hold at once on its thread: so many, and so many for each byte that it
    /// is given. 1 MiB and 16 otherwise.
    pub fn holds(self, fixed: usize, times: usize) -> Self {
        Self { fixed, times, ..self }
    }

    /// What the reader's own threads hold counts, too, where a time is given: then nothing else runs in the
    /// process, while other tests may otherwise.
    pub fn on_other_threads(self) -> Self {
        Self { other_threads: true, ..self }
    }

    /// How often it is tried where no time is given; for readers that are slow. 2,000 otherwise.
    pub fn tries(self, tries: usize) -> Self {
        Self { tries, ..self }
    }

    /// Puts right what the reader checks before anything else (a checksum, a length), so that changes get
    /// behind it. Half of all inputs are mended.
    pub fn mended_by(self, mend: fn(&mut [u8])) -> Self {
        Self { mend, ..self }
    }

    /// Has `read` read the samples and changes of them.
    ///
    /// # Panics
    ///
    /// With the input in hexadecimal where `read` panics, holds too much or hangs.
    pub fn check(self, read: impl Fn(&[u8])) {
        let seed = number("COX_FUZZ_SEED").unwrap_or(0);
        let until = number("COX_FUZZ_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
        let alone = until.is_some();
        let attack = |input: &[u8]| self.attack(input, &read, alone);
        let mut corpus = Corpus::new(self.name, &self.samples);
        if let Some(input) = corpus.replayed() {
            return attack(&input);
        }
        corpus.attempt_known(attack);
        let mut mutator = Mutator::new(self.name, seed);
        let mut tried = 0;
        while until.map_or(tried < self.tries, |until| Instant::now() < until) {
            let mut input = mutator.next(&corpus.inputs());
            if tried % 2 == 0 {
                (self.mend)(&mut input);
            }
            corpus.attempt(input, attack);
            tried += 1;
        }
        if alone {
            println!("{}: {tried} tries{}", self.name, corpus.reach());
        }
        corpus.keep(attack).expect("a file for what is kept");
    }

    fn attack(&self, input: &[u8], read: &impl Fn(&[u8]), alone: bool) {
        let (mut result, mut held, mut took) = self.attempt(input, read, alone);
        if took > HANGS {
            // A machine that does something else takes its time, too.
            (result, held, took) = self.attempt(input, read, alone);
        }
        let bound = self.fixed + self.times * input.len();
        let wrong = match result {
            Err(_) => "panicked".to_owned(),
            Ok(()) if held > bound => format!("held {held} bytes at once, its bound is {bound}"),
            Ok(()) if took > HANGS => format!("took {took:?}"),
            Ok(()) => return,
        };
        panic!("{}: {wrong} with these {} bytes:\n{}", self.name, input.len(), hexadecimal(input));
    }

    /// How the reader ended, the most bytes that it held, and how long it took.
    fn attempt(
        &self,
        input: &[u8],
        read: &impl Fn(&[u8]),
        alone: bool,
    ) -> (thread::Result<()>, usize, Duration) {
        let began = Instant::now();
        let attempt = || panic::catch_unwind(AssertUnwindSafe(|| read(input)));
        let (result, held) = match self.other_threads && alone {
            true => allocations::most_of_all_during(attempt),
            false => allocations::most_during(attempt),
        };
        (result, held, began.elapsed())
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is a whole number, not {text:?}")))
}

/// As `xxd -r -p` takes it.
fn hexadecimal(bytes: &[u8]) -> String {
    bytes.chunks(32).fold(String::new(), |mut text, line| {
        for byte in line {
            let _ = write!(text, "{byte:02x}");
        }
        text + "\n"
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn fails(target: Target, read: impl Fn(&[u8])) -> String {
        let fault = panic::catch_unwind(AssertUnwindSafe(|| target.check(read))).expect_err("it passed");
        fault.downcast_ref::<String>().cloned().expect("a text")
    }

    /// A length of two bytes, and so many bytes: read by one who believes it.
    fn gullible(bytes: &[u8]) {
        if let [a, b, rest @ ..] = bytes {
            let length = usize::from(u16::from_le_bytes([*a, *b]));
            assert!(rest.len() < 200 || rest[..length].len() == length);
        }
    }

    #[test]
    fn a_reader_that_believes_a_length_is_found_out() {
        let sample = [vec![250, 0], vec![7; 250]].concat();
        let message = fails(Target::new("gullible", [sample]), gullible);
        assert!(message.starts_with("gullible: panicked with these "), "{message}");
    }

    #[test]
    fn a_reader_that_allocates_what_it_is_told_is_found_out() {
        let read = |bytes: &[u8]| {
            let length = bytes.get(..4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], 0]));
            std::hint::black_box(vec![0u8; length as usize]);
        };
        let message = fails(Target::new("greedy", [vec![4, 0, 0, 0, 1, 2, 3, 4]]), read);
        assert!(message.contains("its bound is "), "{message}");
    }

    #[test]
    fn what_other_threads_hold_is_counted_where_it_is_to_be() {
        let elsewhere = || std::thread::spawn(|| drop(std::hint::black_box(vec![0u8; 64 << 20]))).join();
        // Tests beside this one give back up to 16 MiB meanwhile.
        assert!(allocations::most_of_all_during(elsewhere).1 >= 32 << 20);
        assert!(allocations::most_during(elsewhere).1 < 1 << 20);
    }

    #[test]
    fn changes_get_behind_a_checksum_that_is_mended() {
        let mend = |bytes: &mut [u8]| {
            if let Some((sum, rest)) = bytes.split_first_chunk_mut::<4>() {
                *sum = crc32fast::hash(rest).to_le_bytes();
            }
        };
        let (behind, all) = (Cell::new(0), Cell::new(0));
        let sample = [crc32fast::hash(b"payload").to_le_bytes().to_vec(), b"payload".to_vec()].concat();
        Target::new("summed", [sample]).mended_by(mend).check(|bytes| {
            all.set(all.get() + 1);
            let rest = bytes.get(4..).unwrap_or_default();
            let sum = bytes.get(..4) == Some(&crc32fast::hash(rest).to_le_bytes());
            behind.set(behind.get() + usize::from(sum && rest != b"payload"));
        });
        assert!(2 * behind.get() > all.get() / 2, "{} of {}", behind.get(), all.get());
    }

    #[test]
    fn the_same_inputs_are_drawn_twice() {
        let drawn = || {
            let all = std::cell::RefCell::new(Vec::new());
            Target::new("again", [vec![1; 40]])
                .tries(50)
                .check(|bytes| all.borrow_mut().push(bytes.to_vec()));
            all.into_inner()
        };
        assert_eq!(drawn(), drawn());
    }
}
