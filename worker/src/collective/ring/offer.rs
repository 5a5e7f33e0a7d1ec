//! Neighbours that have found each other agree on shared memory, direction by direction, where they are on
//! one machine.
//!
//! ```text
//! this rank    -> next       offer { where its memory is }, or none
//! next         -> this rank  taken, or not: then the socket carries everything
//! ```

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    os::fd::AsFd,
};

use nix::poll::PollFlags;

use super::{
    patience::{Patience, Stop},
    shared::{MemoryOffer, MemoryPlace, Reader, Writer},
};

const MAGIC: [u8; 6] = *b"CXlane";
const OFFER: usize = 24;
const TAKEN: u8 = 1;
const DECLINED: u8 = 0;

/// Which neighbour was lost, and how.
pub(super) enum LostNeighbour {
    Next(Stop),
    Previous(Stop),
}

/// Both directions of this rank; none where the neighbour is elsewhere. With `allowed` false nothing is
/// offered or taken.
pub(super) fn agree(
    next: &TcpStream,
    previous: &TcpStream,
    allowed: bool,
    patience: &Patience<'_>,
) -> Result<(Option<Writer>, Option<Reader>), LostNeighbour> {
    // No memory, no shared lane.
    let offer = if allowed && same_machine(next) { MemoryOffer::new().ok() } else { None };
    say(next, &encode(offer.as_ref().map(MemoryOffer::place))).map_err(LostNeighbour::Next)?;
    let mut bytes = [0; OFFER];
    hear(previous, &mut bytes, patience).map_err(LostNeighbour::Previous)?;
    let place = decode(&bytes).map_err(|error| LostNeighbour::Previous(Stop::Broken(error)))?;
    let reader = place.filter(|_| allowed).and_then(|place| Reader::open(&place).ok());
    say(previous, &[if reader.is_some() { TAKEN } else { DECLINED }]).map_err(LostNeighbour::Previous)?;
    let mut verdict = [0];
    hear(next, &mut verdict, patience).map_err(LostNeighbour::Next)?;
    let writer = offer.filter(|_| verdict == [TAKEN]).map(MemoryOffer::taken);
    Ok((writer, reader))
}

/// Whether the connection does not leave the machine. It may still lead to another container.
fn same_machine(socket: &TcpStream) -> bool {
    match (socket.local_addr(), socket.peer_addr()) {
        (Ok(ours), Ok(theirs)) => ours.ip() == theirs.ip() || theirs.ip().is_loopback(),
        _ => false,
    }
}

fn encode(place: Option<MemoryPlace>) -> [u8; OFFER] {
    let mut bytes = [0; OFFER];
    bytes[0..6].copy_from_slice(&MAGIC);
    if let Some(MemoryPlace { pid, fd, nonce }) = place {
        bytes[6] = 1;
        bytes[8..12].copy_from_slice(&pid.to_le_bytes());
        bytes[12..16].copy_from_slice(&fd.to_le_bytes());
        bytes[16..24].copy_from_slice(&nonce.to_le_bytes());
    }
    bytes
}

fn decode(bytes: &[u8; OFFER]) -> io::Result<Option<MemoryPlace>> {
    if bytes[0..6] != MAGIC {
        return Err(io::Error::new(ErrorKind::InvalidData, "it does not speak the ring's protocol"));
    }
    let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    let nonce = u64::from_le_bytes(std::array::from_fn(|i| bytes[16 + i]));
    Ok((bytes[6] == 1).then(|| MemoryPlace { pid: u32_at(8), fd: u32_at(12), nonce }))
}

/// A few bytes on a fresh connection: the kernel takes them at once or the connection is broken.
fn say(mut socket: &TcpStream, bytes: &[u8]) -> Result<(), Stop> {
    socket.write_all(bytes).map_err(Stop::Broken)
}

fn hear(mut socket: &TcpStream, bytes: &mut [u8], patience: &Patience<'_>) -> Result<(), Stop> {
    let mut filled = 0;
    while filled < bytes.len() {
        patience.ready(socket.as_fd(), PollFlags::POLLIN)?;
        match socket.read(&mut bytes[filled..]) {
            Ok(0) => {
                return Err(Stop::Broken(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    "it closed the connection",
                )));
            }
            Ok(count) => filled += count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(Stop::Broken(error)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_survives_the_wire_and_garbage_does_not() {
        let place = MemoryPlace { pid: 7, fd: 9, nonce: 1 << 60 };
        for offer in [None, Some(place)] {
            assert_eq!(decode(&encode(offer)).expect("ours"), offer);
        }
        assert!(decode(&[b'G'; OFFER]).is_err());
    }
}
