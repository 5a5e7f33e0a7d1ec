//! A look at what parquet files keep in Thrift's compact protocol (footers, headers of pages) before
//! parquet's own reader takes it.
//!
//! That reader passes over fields that it does not know, and takes no byte for a truth value in a list or
//! map: six bytes that promise two billion of them cost it seconds, a file of 3 KB with a garbled header half
//! a minute. The format has no list or map of truth values in either place, so one is refused. Every other
//! value takes a byte or more, so what is left is read in a time that the file's size bounds.
//!
//! Not caught: a field that is known and declared to be of another kind. parquet's reader goes by its number
//! alone, and reads other fields than this one from there on.
//!
//! Source: apache/thrift, doc/specs/thrift-compact-protocol.md.

use std::io::{self, Read};

/// Nested structures, lists and maps at most: parquet's reader allows as many.
const DEPTH: usize = 64;

/// Reads one structure, and refuses what parquet's reader would spin on.
pub fn sound(from: &mut dyn Read) -> io::Result<()> {
    structure(from, DEPTH)
}

fn structure(from: &mut dyn Read, depth: usize) -> io::Result<()> {
    loop {
        let header = byte(from)?;
        if header & 0xf == 0 {
            return Ok(());
        }
        if header >> 4 == 0 {
            number(from)?; // the field's number, where it is not the last one's and a little
        }
        value(from, header & 0xf, depth)?;
    }
}

fn value(from: &mut dyn Read, kind: u8, depth: usize) -> io::Result<()> {
    let inner = || depth.checked_sub(1).ok_or_else(|| refused("is nested too deep"));
    match kind {
        1 | 2 => Ok(()), // a field's truth value is its kind
        3 => byte(from).map(drop),
        4..=6 => number(from).map(drop),
        7 => pass(from, 8),
        8 => number(from).and_then(|length| pass(from, length)),
        9 | 10 => list(from, inner()?),
        11 => map(from, inner()?),
        12 => structure(from, inner()?),
        13 => pass(from, 16),
        _ => Err(refused("has a value of an unknown kind")),
    }
}

fn list(from: &mut dyn Read, depth: usize) -> io::Result<()> {
    let header = byte(from)?;
    let count = match header >> 4 {
        15 => number(from)?,
        count => u64::from(count),
    };
    values(from, count, &[header & 0xf], depth)
}

fn map(from: &mut dyn Read, depth: usize) -> io::Result<()> {
    let count = number(from)?;
    if count == 0 {
        return Ok(());
    }
    let kinds = byte(from)?;
    values(from, count, &[kinds >> 4, kinds & 0xf], depth)
}

/// So many times a value of each kind.
fn values(from: &mut dyn Read, count: u64, kinds: &[u8], depth: usize) -> io::Result<()> {
    if count > 0 && kinds.iter().any(|kind| matches!(kind, 1 | 2)) {
        return Err(refused("lists truth values, which no version of the format does"));
    }
    for _ in 0..count {
        kinds.iter().try_for_each(|kind| value(from, *kind, depth))?;
    }
    Ok(())
}

fn byte(from: &mut dyn Read) -> io::Result<u8> {
    let mut one = [0];
    from.read_exact(&mut one)?;
    Ok(one[0])
}

/// An unsigned number: seven bits a byte, the lowest first.
fn number(from: &mut dyn Read) -> io::Result<u64> {
    let mut number = 0;
    for shift in (0..70).step_by(7) {
        let byte = byte(from)?;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(number);
        }
    }
    Err(refused("has a number of more than 64 bits"))
}

fn pass(from: &mut dyn Read, bytes: u64) -> io::Result<()> {
    match io::copy(&mut from.take(bytes), &mut io::sink())? == bytes {
        true => Ok(()),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn refused(fault: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the metadata {fault}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(bytes: &[u8]) -> String {
        sound(&mut &bytes[..]).expect_err("it is refused").to_string()
    }

    #[test]
    fn every_kind_of_value_is_passed_over() {
        // Numbered 1 to 9 by steps of one, then 300 by its number.
        let fields: [&[u8]; 10] = [
            &[0x11],                         // true
            &[0x13, 7],                      // a byte
            &[0x16, 0xff, 0x01],             // a number of two bytes
            &[0x17, 0, 0, 0, 0, 0, 0, 0, 0], // a double
            &[0x18, 2, b'h', b'i'],          // text
            &[0x19, 0x25, 1, 2],             // two numbers
            &[0x1b, 1, 0x85, 1, b'k', 5],    // a map from text to a number
            &[0x1c, 0x12, 0],                // a structure that holds false
            &[0x19, 0],                      // an empty list, as some writers have it
            &[0x05, 0xd8, 0x04, 9],          // a number
        ];
        let bytes = [fields.concat(), vec![0]].concat();
        let mut rest = &bytes[..];
        sound(&mut rest).unwrap();
        assert_eq!(rest, b"");
        for end in 0..bytes.len() {
            assert_eq!(sound(&mut &bytes[..end]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{end}");
        }
    }

    #[test]
    fn what_takes_no_bytes_may_not_be_many() {
        let many = [0xff, 0xff, 0xff, 0xff, 0x07];
        for start in [&[0x19, 0xf1][..], &[0x1a, 0xf2]] {
            assert!(fault(&[start, &many].concat()).contains("truth values"));
        }
        assert!(fault(&[&[0x1b], &many[..], &[0x11]].concat()).contains("truth values"));
        assert!(fault(&[0x1c; 200]).contains("nested too deep"));
        assert!(fault(&[0x1e]).contains("unknown kind"));
        assert!(fault(&[[0x16].as_slice(), &[0xff; 11]].concat()).contains("64 bits"));
    }
}
