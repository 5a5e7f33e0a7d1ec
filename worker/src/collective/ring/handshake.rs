//! Who may join a ring: the first bytes on a connection, in both directions.
//!
//! ```text
//! connecting rank  -> Opening   { magic, byte order, version, run, generation, rank, to, world | key's name,
//! nonce } accepting rank   -> Challenge { nonce }, if it knows that key
//! connecting rank  -> proof that it has the key
//! accepting rank   -> Answer    { verdict, its generation } and proof that it has the key, too
//! connecting rank  -> Confirm, only if it was welcome: it is still there
//! ```
//!
//! A stranger, who cannot prove a token of this ring's (`proof`), is told nothing but a nonce. A rank of
//! another run or a stale generation is refused with the reason. Either way the accepting rank goes on
//! listening. The last message keeps a rank from counting on a neighbour that gave up while its connection
//! sat in the queue.
//!
//! This decides who is let in. What follows is neither encrypted nor signed: who can change packets on the
//! way can change what is trained. Data-plane ports belong on a network whose switches are trusted.

use coxswain_proto::ids::Generation;

use crate::collective::proof::{NAME, NONCE, PROOF};

/// Grows whenever the bytes of this file, of `offer`, `echo`, `wire`, of what ranks tell each other first
/// (`hybrid::join`), the fields of a ballot (`train::vote`), or the order of reductions change.
const VERSION: u16 = 6;
const MAGIC: [u8; 6] = *b"CXring";
/// Written in the machine's own byte order: payloads are not converted, so neighbours must share it.
const ORDER: u16 = 0x0102;

/// Bytes of what a rank says of itself.
const HELLO: usize = 62;
/// Bytes of an opening.
pub(super) const OPENING: usize = HELLO + NAME + NONCE;
/// Bytes of an answer.
pub(super) const ANSWER: usize = 16;
/// Bytes of an answer with its proof.
pub(super) const PROVEN_ANSWER: usize = ANSWER + PROOF;
/// The connecting rank's last word.
pub(super) const CONFIRM: [u8; 4] = *b"CXgo";

/// What a connecting rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    version: u16,
    run: [u8; 32],
    pub generation: Generation,
    pub rank: u32,
    /// The rank it means to reach.
    to: u32,
    world: u32,
}

/// What an accepting rank makes of a [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Admission {
    #[error("welcome")]
    Welcome = 1,
    #[error("it runs another version of the ring protocol; start the same binary everywhere")]
    OtherVersion,
    #[error("it belongs to another run")]
    OtherRun,
    #[error("it is already in a newer generation")]
    Stale,
    #[error("it is still in an older generation")]
    Early,
    #[error("it expects another neighbour in the ring")]
    OtherPlace,
}

impl Admission {
    /// Whether asking again may help: the neighbour has yet to learn of this generation.
    pub(super) fn may_change(self) -> bool {
        self == Self::Early
    }
}

impl Hello {
    pub(super) fn new(run: &str, generation: Generation, rank: usize, to: usize, world: usize) -> Self {
        Self {
            version: VERSION,
            run: *blake3::hash(run.as_bytes()).as_bytes(),
            generation,
            rank: rank as u32,
            to: to as u32,
            world: world as u32,
        }
    }

    /// The first bytes of a conversation: this, which key it is about, and a nonce.
    pub(super) fn first_bytes(&self, key: [u8; NAME], nonce: [u8; NONCE]) -> [u8; OPENING] {
        let mut bytes = [0; OPENING];
        bytes[..HELLO].copy_from_slice(&self.encode());
        bytes[HELLO..HELLO + NAME].copy_from_slice(&key);
        bytes[HELLO + NAME..].copy_from_slice(&nonce);
        bytes
    }

    fn encode(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[0..6].copy_from_slice(&MAGIC);
        bytes[6..8].copy_from_slice(&ORDER.to_ne_bytes());
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10..42].copy_from_slice(&self.run);
        bytes[42..50].copy_from_slice(&self.generation.0.to_le_bytes());
        bytes[50..54].copy_from_slice(&self.rank.to_le_bytes());
        bytes[54..58].copy_from_slice(&self.to.to_le_bytes());
        bytes[58..62].copy_from_slice(&self.world.to_le_bytes());
        bytes
    }

    /// What a rank says of itself in an opening, and the name of its key; `None` for a stranger.
    pub(super) fn opened(bytes: &[u8; OPENING]) -> Option<(Self, [u8; NAME])> {
        Some((Self::decode(bytes)?, std::array::from_fn(|i| bytes[HELLO + i])))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes[0..6] != MAGIC || bytes[6..8] != ORDER.to_ne_bytes() {
            return None;
        }
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Some(Self {
            version: u16::from_le_bytes([bytes[8], bytes[9]]),
            run: std::array::from_fn(|i| bytes[10 + i]),
            generation: Generation(u64::from_le_bytes(std::array::from_fn(|i| bytes[42 + i]))),
            rank: u32_at(50),
            to: u32_at(54),
            world: u32_at(58),
        })
    }

    /// What a rank that waits for exactly `self` answers to `other`.
    pub(super) fn judge(&self, other: &Hello) -> Admission {
        if other.version != self.version {
            Admission::OtherVersion
        } else if other.run != self.run {
            Admission::OtherRun
        } else if other.generation < self.generation {
            Admission::Stale
        } else if other.generation > self.generation {
            Admission::Early
        } else if other != self {
            Admission::OtherPlace
        } else {
            Admission::Welcome
        }
    }
}

/// An answer as bytes.
pub(super) fn encode_answer(verdict: Admission, generation: Generation) -> [u8; ANSWER] {
    let mut bytes = [0; ANSWER];
    bytes[0..6].copy_from_slice(&MAGIC);
    bytes[6] = verdict as u8;
    bytes[8..16].copy_from_slice(&generation.0.to_le_bytes());
    bytes
}

/// The verdict and the generation of the rank that gave it; `None` if that was no rank of ours.
pub(super) fn decode_answer(bytes: &[u8; ANSWER]) -> Option<(Admission, Generation)> {
    use Admission::*;
    let verdict = [Welcome, OtherVersion, OtherRun, Stale, Early, OtherPlace]
        .into_iter()
        .find(|verdict| *verdict as u8 == bytes[6])?;
    let generation = Generation(u64::from_le_bytes(std::array::from_fn(|i| bytes[8 + i])));
    (bytes[0..6] == MAGIC).then_some((verdict, generation))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(run: &str, generation: u64, rank: usize, world: usize) -> Hello {
        Hello::new(run, Generation(generation), rank, 0, world)
    }

    #[test]
    fn opening_and_answer_survive_the_wire() {
        let sent = hello("run", 7, 3, 4);
        let opening = sent.first_bytes([7; NAME], [9; NONCE]);
        assert_eq!(Hello::opened(&opening), Some((sent, [7; NAME])));
        let answer = encode_answer(Admission::Stale, Generation(9));
        assert_eq!(decode_answer(&answer), Some((Admission::Stale, Generation(9))));
        assert_eq!(Hello::opened(&[b'G'; OPENING]), None);
        assert_eq!(decode_answer(&[b'H'; ANSWER]), None);
    }

    #[test]
    fn hostile_openings_answers_and_headers_are_strangers_or_judged() {
        let awaited = hello("run", 7, 3, 4);
        let opening = awaited.first_bytes([7; NAME], [9; NONCE]).to_vec();
        let answer = encode_answer(Admission::Stale, Generation(9)).to_vec();
        coxswain_fuzz::Target::new("a ring's handshake", [opening, answer]).tries(20_000).check(|bytes| {
            let (mut opening, mut answer) = ([0; OPENING], [0; ANSWER]);
            opening.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            answer.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            if let Some((hello, _)) = Hello::opened(&opening) {
                let welcome = awaited.judge(&hello) == Admission::Welcome;
                assert_eq!(welcome, hello == awaited, "{hello:?}");
            }
            let _ = decode_answer(&answer);
        });
    }

    #[test]
    fn each_kind_of_wrong_neighbour_gets_its_verdict() {
        let awaited = hello("run", 7, 3, 4);
        let newer = Hello { version: VERSION + 1, ..awaited };
        for (other, verdict) in [
            (awaited.clone(), Admission::Welcome),
            (newer, Admission::OtherVersion),
            (hello("another", 7, 3, 4), Admission::OtherRun),
            (hello("run", 6, 3, 4), Admission::Stale),
            (hello("run", 8, 3, 4), Admission::Early),
            (hello("run", 7, 2, 4), Admission::OtherPlace),
            (hello("run", 7, 3, 5), Admission::OtherPlace),
        ] {
            assert_eq!(awaited.judge(&other), verdict);
        }
    }
}
