//! Bytes on the wire: the header that opens every collective on every connection.
//!
//! ```text
//! 0       4     5     6        7     8      12     16         24       32
//! "CXcl"  op    kind  reduce   0     root   world  sequence   length   payload ...
//! ```
//!
//! Integers are little-endian; the payload is in the machine's own order (the handshake refuses a neighbour
//! of the other order). A neighbour that is in another collective sends another header, and the receiver says
//! so instead of adding up garbage.

use std::fmt;

use super::element::Kind;
use crate::collective::Reduce;

/// Bytes of a header.
pub(super) const HEADER: usize = 32;
const MAGIC: [u8; 4] = *b"CXcl";

/// Operations, as they appear on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::collective) enum Operation {
    AllReduce = 1,
    ReduceScatter,
    AllGather,
    Broadcast,
    Barrier,
    Shift,
}

impl Operation {
    pub(in crate::collective) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::Shift => "shift",
        }
    }

    fn from_wire(byte: u8) -> Option<Self> {
        use Operation::{AllGather, AllReduce, Barrier, Broadcast, ReduceScatter, Shift};
        [AllReduce, ReduceScatter, AllGather, Broadcast, Barrier, Shift]
            .into_iter()
            .find(|op| *op as u8 == byte)
    }
}

/// Which collective this is; neighbours must agree on all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub operation: Operation,
    pub kind: Kind,
    /// None for operations that combine nothing.
    pub reduce: Option<Reduce>,
    /// How far a shift goes; 0 where there is no root.
    pub root: u32,
    pub world: u32,
    pub sequence: u64,
    /// Elements of the whole buffer.
    pub length: u64,
}

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4] = self.operation as u8;
        bytes[5] = match self.kind {
            Kind::Bf16 => 2,
            Kind::F32 => 4,
            Kind::F64 => 8,
        };
        bytes[6] = match self.reduce {
            None => 0,
            Some(Reduce::Sum) => 1,
            Some(Reduce::Max) => 2,
        };
        bytes[8..12].copy_from_slice(&self.root.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.world.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// `None` if these bytes are no header of ours.
    pub(super) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let [m0, m1, m2, m3, operation, kind, reduce, zero, rest @ ..] = *bytes;
        if [m0, m1, m2, m3] != MAGIC || zero != 0 {
            return None;
        }
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| rest[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| rest[at + i]));
        Some(Self {
            operation: Operation::from_wire(operation)?,
            kind: match kind {
                2 => Kind::Bf16,
                4 => Kind::F32,
                8 => Kind::F64,
                _ => return None,
            },
            reduce: match reduce {
                0 => None,
                1 => Some(Reduce::Sum),
                2 => Some(Reduce::Max),
                _ => return None,
            },
            root: u32_at(0),
            world: u32_at(4),
            sequence: u64_at(8),
            length: u64_at(16),
        })
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Bf16 => "bf16",
            Kind::F32 => "f32",
            Kind::F64 => "f64",
        };
        write!(f, "{} number {} of {} {kind}", self.operation.name(), self.sequence, self.length)?;
        match self.reduce {
            Some(Reduce::Sum) => f.write_str(" (sum)")?,
            Some(Reduce::Max) => f.write_str(" (max)")?,
            None => {}
        }
        match self.operation {
            Operation::Broadcast => write!(f, " from rank {}", self.root)?,
            Operation::Shift => write!(f, " by {}", self.root)?,
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_wire_and_garbage_does_not() {
        let header = Header {
            operation: Operation::Broadcast,
            kind: Kind::F64,
            reduce: Some(Reduce::Max),
            root: 3,
            world: 5,
            sequence: 1 << 40,
            length: 12345678901,
        };
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes), Some(header));
        for at in [0, 4, 5, 6, 7] {
            let mut garbled = bytes;
            garbled[at] ^= 0x77;
            assert_eq!(Header::decode(&garbled), None, "byte {at}");
        }
    }
}
