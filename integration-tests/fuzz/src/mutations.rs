//! Changes of samples.

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};

/// Numbers at which readers go wrong: nothing, one, the ends of types, and what is beyond a limit.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    1 << 40,
    i64::MAX as u64,
    u64::MAX,
];
/// Longest input that is made of a sample by repeating parts of it, beyond its own length.
const GROWN: usize = 1 << 16;

/// What there is to change.
pub(crate) struct Inputs<'a> {
    pub(crate) samples: &'a [Vec<u8>],
    /// By this search or by one before it.
    pub(crate) found: &'a [Vec<u8>],
}

/// Draws inputs.
pub(crate) struct Mutator {
    rng: ChaCha8Rng,
}

impl Mutator {
    pub(crate) fn new(name: &str, seed: u64) -> Self {
        // FNV-1a: any function of the name would do.
        let hashed = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self { rng: ChaCha8Rng::seed_from_u64(hashed ^ seed) }
    }

    /// A sample with one to eight changes; now and then nothing but noise.
    pub(crate) fn next(&mut self, inputs: &Inputs) -> Vec<u8> {
        let mut input = self.pick(inputs).clone();
        if self.below(50) == 0 {
            input.truncate(512);
            self.rng.fill_bytes(&mut input);
        }
        let most = 1 << self.below(4);
        for _ in 0..=self.below(most) {
            self.change(&mut input, inputs);
        }
        input
    }

    fn change(&mut self, input: &mut Vec<u8>, inputs: &Inputs) {
        if input.is_empty() {
            input.push(self.rng.next_u32() as u8);
            return;
        }
        let at = self.below(input.len());
        match self.below(8) {
            0 => input[at] ^= 1 << self.below(8),
            1 => input[at] = self.rng.next_u32() as u8,
            2 => self.edge(&mut input[at..]),
            3 => input.truncate(at),
            4 => drop(input.drain(at..at + self.part(input.len() - at))),
            5 => {
                let copy = input[at..at + self.part(input.len() - at)].to_vec();
                let to = self.below(input.len() + 1);
                drop(input.splice(to..to, copy));
            }
            6 => self.splice(input, at, inputs),
            _ => self.repeat(input, at),
        }
    }

    /// A number of one to eight bytes, of either order, at the beginning.
    fn edge(&mut self, place: &mut [u8]) {
        let value = EDGES[self.below(EDGES.len())];
        let width = [1, 2, 4, 8][self.below(4)].min(place.len());
        match self.below(2) {
            0 => place[..width].copy_from_slice(&value.to_le_bytes()[..width]),
            _ => place[..width].copy_from_slice(&value.to_be_bytes()[8 - width..]),
        }
    }

    /// Goes on as another sample does.
    fn splice(&mut self, input: &mut Vec<u8>, at: usize, inputs: &Inputs) {
        let other = self.pick(inputs);
        input.truncate(at);
        input.extend_from_slice(&other[at.min(other.len())..]);
    }

    /// Writes a few bytes many times: nesting, and lists without an end.
    fn repeat(&mut self, input: &mut Vec<u8>, at: usize) {
        let part = input[at..at + self.part(input.len() - at).min(16)].to_vec();
        let most = (GROWN / part.len()) >> self.below(12);
        let times = self.below(most + 1);
        drop(input.splice(at..at, part.repeat(times)));
    }

    /// A length from 1 to `most`; short ones are drawn more often.
    fn part(&mut self, most: usize) -> usize {
        let most = 1 + self.below(most);
        1 + self.below(most)
    }

    /// Samples as often as what was found, of which most are refused early: newer ones are drawn more often,
    /// for they reach further.
    fn pick<'a>(&mut self, inputs: &Inputs<'a>) -> &'a Vec<u8> {
        let found = inputs.found.len();
        if found == 0 || self.below(2) == 0 {
            return &inputs.samples[self.below(inputs.samples.len())];
        }
        &inputs.found[self.below(found).max(self.below(found))]
    }

    fn below(&mut self, end: usize) -> usize {
        (self.rng.next_u64() % end as u64) as usize
    }
}
