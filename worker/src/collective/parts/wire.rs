//! What is said between a rank that lacks parts of blocks and one that holds them.
//!
//! ```text
//! caller   -> Opening    { magic, byte order, version, run, blocks, rank, to, world | key's name, nonce }
//! called   -> Challenge  { nonce }, if it knows that key
//! caller   -> proof that it has the key
//! called   -> Answer     { verdict } and proof that it has the key, too
//! caller   -> block                          any number of times, one after the other
//! called   -> length, and so many bytes      or NOT_HERE
//! ```
//!
//! Integers are little-endian, bytes of parts in the machine's own order, which both have.

use std::io::{self, Read, Write};

use crate::collective::proof::{NAME, NONCE, PROOF};

/// Grows whenever the bytes of this file change, or what a part is.
const VERSION: u16 = 1;
const MAGIC: [u8; 6] = *b"CXpart";
/// Written in the machine's own byte order.
const ORDER: u16 = 0x0102;

const HELLO: usize = 86;
/// Bytes of an opening.
pub(super) const OPENING: usize = HELLO + NAME + NONCE;
/// Bytes of an answer.
pub(super) const ANSWER: usize = 8;
/// Bytes of an answer with its proof.
pub(super) const PROVEN_ANSWER: usize = ANSWER + PROOF;
/// In place of a length: the called rank does not hold this part.
pub(super) const NOT_HERE: u64 = u64::MAX;

/// What a caller says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    /// Names the run and its specification.
    pub run: [u8; 32],
    /// Names how blocks are cut up.
    pub blocks: [u8; 32],
    /// The caller.
    pub rank: u32,
    /// The rank whose parts it means.
    pub to: u32,
    /// Parts of a block.
    pub world: u32,
}

/// What the called rank makes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum GreetingReply {
    #[error("welcome")]
    Welcome = 1,
    #[error("it belongs to another run")]
    OtherRun,
    #[error("its model has another layout than this rank's: do both load the same files?")]
    OtherBlocks,
}

impl Greeting {
    /// The first bytes of a conversation: this, which key it is about, and a nonce.
    pub(super) fn first_bytes(&self, key: [u8; NAME], nonce: [u8; NONCE]) -> [u8; OPENING] {
        let mut bytes = [0; OPENING];
        bytes[0..6].copy_from_slice(&MAGIC);
        bytes[6..8].copy_from_slice(&ORDER.to_ne_bytes());
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10..42].copy_from_slice(&self.run);
        bytes[42..74].copy_from_slice(&self.blocks);
        bytes[74..78].copy_from_slice(&self.rank.to_le_bytes());
        bytes[78..82].copy_from_slice(&self.to.to_le_bytes());
        bytes[82..86].copy_from_slice(&self.world.to_le_bytes());
        bytes[HELLO..HELLO + NAME].copy_from_slice(&key);
        bytes[HELLO + NAME..].copy_from_slice(&nonce);
        bytes
    }

    /// What a caller says of itself, and the name of its key; `None` for a stranger, or another version.
    pub(super) fn opened(bytes: &[u8; OPENING]) -> Option<(Self, [u8; NAME])> {
        let known = bytes[0..6] == MAGIC
            && bytes[6..8] == ORDER.to_ne_bytes()
            && bytes[8..10] == VERSION.to_le_bytes();
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let hello = Self {
            run: std::array::from_fn(|i| bytes[10 + i]),
            blocks: std::array::from_fn(|i| bytes[42 + i]),
            rank: u32_at(74),
            to: u32_at(78),
            world: u32_at(82),
        };
        known.then(|| (hello, std::array::from_fn(|i| bytes[HELLO + i])))
    }

    /// What a rank of this run and these blocks answers.
    pub(super) fn judge(&self, run: &[u8; 32], blocks: &[u8; 32]) -> GreetingReply {
        match () {
            () if self.run != *run => GreetingReply::OtherRun,
            () if self.blocks != *blocks => GreetingReply::OtherBlocks,
            () => GreetingReply::Welcome,
        }
    }
}

/// An answer as bytes.
pub(super) fn encode_answer(verdict: GreetingReply) -> [u8; ANSWER] {
    let mut bytes = [0; ANSWER];
    bytes[0..6].copy_from_slice(&MAGIC);
    bytes[6] = verdict as u8;
    bytes
}

/// The verdict; `None` if that was no rank of ours.
pub(super) fn decode_answer(bytes: &[u8; ANSWER]) -> Option<GreetingReply> {
    let verdicts = [GreetingReply::Welcome, GreetingReply::OtherRun, GreetingReply::OtherBlocks];
    let verdict = verdicts.into_iter().find(|verdict| *verdict as u8 == bytes[6])?;
    (bytes[0..6] == MAGIC).then_some(verdict)
}

/// So many bytes.
pub(super) fn hear<const N: usize>(mut from: impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Asks for a block.
pub(super) fn ask(mut to: impl Write, block: usize) -> io::Result<()> {
    let block = u32::try_from(block).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    to.write_all(&block.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Greeting {
        Greeting { run: [1; 32], blocks: [2; 32], rank: 3, to: 0, world: 4 }
    }

    #[test]
    fn opening_and_answer_survive_the_wire() {
        let opening = hello().first_bytes([7; NAME], [9; NONCE]);
        assert_eq!(Greeting::opened(&opening), Some((hello(), [7; NAME])));
        for verdict in [GreetingReply::Welcome, GreetingReply::OtherRun, GreetingReply::OtherBlocks] {
            assert_eq!(decode_answer(&encode_answer(verdict)), Some(verdict));
        }
        assert_eq!(hello().judge(&[1; 32], &[2; 32]), GreetingReply::Welcome);
        assert_eq!(hello().judge(&[9; 32], &[2; 32]), GreetingReply::OtherRun);
        assert_eq!(hello().judge(&[1; 32], &[9; 32]), GreetingReply::OtherBlocks);
    }

    #[test]
    fn hostile_openings_and_answers_are_strangers_or_judged() {
        let opening = hello().first_bytes([7; NAME], [9; NONCE]).to_vec();
        let answer = encode_answer(GreetingReply::OtherRun).to_vec();
        coxswain_fuzz::Target::new("a rank's parts", [opening, answer]).tries(20_000).check(|bytes| {
            let (mut opening, mut answer) = ([0; OPENING], [0; ANSWER]);
            opening.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            answer.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            if let Some((hello, key)) = Greeting::opened(&opening) {
                let nonce = std::array::from_fn(|i| opening[HELLO + NAME + i]);
                assert_eq!(hello.first_bytes(key, nonce), opening);
            }
            let _ = decode_answer(&answer);
        });
    }
}
