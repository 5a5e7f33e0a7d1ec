//! A look at what parquet files keep in Thrift's compact protocol (footers, headers of pages) before
//! parquet's own reader takes it.
//!
//! The reader passes over fields that it does not know, and takes no byte for a truth value in a list or
//! map: six bytes that promise two billion of them cost it seconds, a file of 3 KB with a garbled header half
//! a minute. The format has no list or map of truth values in either place, so one is refused. Every other
//! value takes a byte or more, so what is left is read in a time that the file's size bounds.
//!
//! The reader goes by a field's number alone, so a field of another kind than the format's would have it
//! read on at another byte than this look: kinds of known fields are compared with the format's, too.
//!
//! Sources: apache/thrift, doc/specs/thrift-compact-protocol.md; apache/parquet-format, parquet.thrift.

use std::io::{self, Read};

use Kind::{Any, Binary, Bool, Byte, Double, List, Number, Struct};

/// Nested structures, lists and maps at most: parquet's reader allows as many.
const DEPTH: usize = 64;

/// What a value is, as far as it matters how many bytes it takes.
#[derive(Clone, Copy)]
pub enum Kind {
    Bool,
    Byte,
    /// A number of 16, 32 or 64 bits: all are written alike.
    Number,
    Double,
    Binary,
    List(&'static Kind),
    Struct(Fields),
    /// A value of any type, in a field that the format does not have, or that parquet's reader passes over.
    Any,
}

/// Known fields of a structure by number; of a union the same.
pub type Fields = &'static [(i16, Kind)];

impl Kind {
    fn is(self, code: u8) -> bool {
        match self {
            Bool => matches!(code, 1 | 2),
            Byte => code == 3,
            Number => matches!(code, 4..=6),
            Double => code == 7,
            Binary => code == 8,
            List(_) => matches!(code, 9 | 10),
            Struct(_) => code == 12,
            Any => true,
        }
    }
}

const EMPTY: Kind = Struct(&[]);
const NUMBERS: Kind = List(&Number);

const STATISTICS: Kind = Struct(&[
    (1, Binary),
    (2, Binary),
    (3, Number),
    (4, Number),
    (5, Binary),
    (6, Binary),
    (7, Bool),
    (8, Bool),
    (9, Number),
]);

/// `PageHeader`.
pub const PAGE: Fields = &[
    (1, Number),
    (2, Number),
    (3, Number),
    (4, Number),
    (5, Struct(&[(1, Number), (2, Number), (3, Number), (4, Number), (5, STATISTICS)])),
    (6, EMPTY),
    (7, Struct(&[(1, Number), (2, Number), (3, Bool)])),
    (
        8,
        Struct(&[
            (1, Number),
            (2, Number),
            (3, Number),
            (4, Number),
            (5, Number),
            (6, Number),
            (7, Bool),
            (8, STATISTICS),
        ]),
    ),
];

/// `FileMetaData`.
pub const FOOTER: Fields = &[
    (1, Number),
    (2, List(&SCHEMA_ELEMENT)),
    (3, Number),
    (4, List(&ROW_GROUP)),
    (5, List(&KEY_VALUE)),
    (6, Binary),
    (7, List(&Struct(&[(1, EMPTY), (2, EMPTY)]))),
    (8, EMPTY),
    (9, Binary),
];

const KEY_VALUE: Kind = Struct(&[(1, Binary), (2, Binary)]);

const SCHEMA_ELEMENT: Kind = Struct(&[
    (1, Number),
    (2, Number),
    (3, Number),
    (4, Binary),
    (5, Number),
    (6, Number),
    (7, Number),
    (8, Number),
    (9, Number),
    (10, LOGICAL_TYPE),
]);

const LOGICAL_TYPE: Kind = Struct(&[
    (1, EMPTY),
    (2, EMPTY),
    (3, EMPTY),
    (4, EMPTY),
    (5, Struct(&[(1, Number), (2, Number)])),
    (6, EMPTY),
    (7, TIME),
    (8, TIME),
    (10, Struct(&[(1, Byte), (2, Bool)])),
    (11, EMPTY),
    (12, EMPTY),
    (13, EMPTY),
    (14, EMPTY),
    (15, EMPTY),
    (16, Struct(&[(1, Byte)])),
    (17, Struct(&[(1, Binary)])),
    (18, Struct(&[(1, Binary), (2, Number)])),
    (19, EMPTY),
]);

const TIME: Kind = Struct(&[(1, Bool), (2, Struct(&[(1, EMPTY), (2, EMPTY), (3, EMPTY)]))]);

const ROW_GROUP: Kind = Struct(&[
    (1, List(&COLUMN_CHUNK)),
    (2, Number),
    (3, Number),
    (4, List(&Struct(&[(1, Number), (2, Bool), (3, Bool)]))),
    (5, Number),
    (6, Number),
    (7, Number),
]);

const COLUMN_CHUNK: Kind = Struct(&[
    (1, Binary),
    (2, Number),
    (3, COLUMN_METADATA),
    (4, Number),
    (5, Number),
    (6, Number),
    (7, Number),
    (8, EMPTY),
    (9, Binary),
]);

const COLUMN_METADATA: Kind = Struct(&[
    (1, Number),
    (2, NUMBERS),
    (3, List(&Binary)),
    (4, Number),
    (5, Number),
    (6, Number),
    (7, Number),
    (8, List(&KEY_VALUE)),
    (9, Number),
    (10, Number),
    (11, Number),
    (12, STATISTICS),
    (13, List(&Struct(&[(1, Number), (2, Number), (3, Number)]))),
    (14, Number),
    (15, Number),
    (16, Struct(&[(1, Number), (2, NUMBERS), (3, NUMBERS)])),
    (17, Struct(&[(1, BOUNDING_BOX), (2, NUMBERS)])),
]);

const BOUNDING_BOX: Kind = Struct(&[
    (1, Double),
    (2, Double),
    (3, Double),
    (4, Double),
    (5, Double),
    (6, Double),
    (7, Double),
    (8, Double),
]);

/// Reads one structure of these fields, and refuses what parquet's reader would spin on.
pub fn sound(from: &mut dyn Read, fields: Fields) -> io::Result<()> {
    structure(from, fields, DEPTH)
}

fn structure(from: &mut dyn Read, fields: Fields, depth: usize) -> io::Result<()> {
    let mut id = 0i16;
    loop {
        let header = byte(from)?;
        let code = header & 0xf;
        if code == 0 {
            return Ok(());
        }
        id = match header >> 4 {
            0 => zigzag(number(from)?) as i16,
            more => id.checked_add(more.into()).ok_or_else(|| refused("has a field number beyond 32,767"))?,
        };
        let known = fields.iter().find(|(known, _)| *known == id);
        value(from, code, known.map_or(Any, |(_, kind)| *kind), depth)?;
    }
}

fn value(from: &mut dyn Read, code: u8, kind: Kind, depth: usize) -> io::Result<()> {
    if !kind.is(code) {
        return Err(refused("has a field of the wrong type"));
    }
    let inner = || depth.checked_sub(1).ok_or_else(|| refused("is nested too deep"));
    match code {
        1 | 2 => Ok(()), // a field's truth value is its kind
        3 => byte(from).map(drop),
        4..=6 => number(from).map(drop),
        7 => pass(from, 8),
        8 => number(from).and_then(|length| pass(from, length)),
        9 | 10 => list(from, if let List(kind) = kind { *kind } else { Any }, inner()?),
        11 => map(from, inner()?),
        12 => structure(from, if let Struct(fields) = kind { fields } else { &[] }, inner()?),
        13 => pass(from, 16),
        _ => Err(refused("has a value of an unknown type")),
    }
}

fn list(from: &mut dyn Read, kind: Kind, depth: usize) -> io::Result<()> {
    let header = byte(from)?;
    let count = match header >> 4 {
        15 => number(from)?,
        count => u64::from(count),
    };
    values(from, count, &[(header & 0xf, kind)], depth)
}

fn map(from: &mut dyn Read, depth: usize) -> io::Result<()> {
    let count = number(from)?;
    if count == 0 {
        return Ok(());
    }
    let codes = byte(from)?;
    values(from, count, &[(codes >> 4, Any), (codes & 0xf, Any)], depth)
}

/// So many times a value of each.
fn values(from: &mut dyn Read, count: u64, each: &[(u8, Kind)], depth: usize) -> io::Result<()> {
    if count > 0 && each.iter().any(|(code, _)| matches!(code, 1 | 2)) {
        return Err(refused("has a list of booleans, which no version of the format allows"));
    }
    for _ in 0..count {
        each.iter().try_for_each(|(code, kind)| value(from, *code, *kind, depth))?;
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

fn zigzag(number: u64) -> i64 {
    (number >> 1) as i64 ^ -((number & 1) as i64)
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
        sound(&mut &bytes[..], FOOTER).expect_err("it is refused").to_string()
    }

    #[test]
    fn every_kind_of_value_is_passed_over() {
        // Numbered 1 to 9 by steps of one, then 300 by its number; of a structure that knows none of them.
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
        sound(&mut rest, &[]).unwrap();
        assert_eq!(rest, b"");
        for end in 0..bytes.len() {
            assert_eq!(
                sound(&mut &bytes[..end], &[]).unwrap_err().kind(),
                io::ErrorKind::UnexpectedEof,
                "{end}"
            );
        }
    }

    #[test]
    fn what_takes_no_bytes_may_not_be_many() {
        let many = [0xff, 0xff, 0xff, 0xff, 0x07];
        for start in [&[0x19, 0xf1][..], &[0x1a, 0xf2]] {
            // As field 20, which the format does not have.
            let field = [&[start[0] & 0xf, 40], &start[1..], &many].concat();
            assert!(fault(&field).contains("booleans"));
        }
        assert!(fault(&[&[0x0b, 40], &many[..], &[0x11]].concat()).contains("booleans"));
        assert!(fault(&[[0x0c, 40]; 200].concat()).contains("nested too deep"));
        assert!(fault(&[0x0e, 40]).contains("unknown type"));
        assert!(fault(&[[0x16].as_slice(), &[0xff; 11]].concat()).contains("64 bits"));
    }

    #[test]
    fn a_known_field_is_of_its_kind() {
        // The version as text: parquet's reader would take its length for the version, and the text for
        // fields.
        assert!(fault(&[0x18, 1, 0]).contains("wrong type"));
        // The same two levels down: the name of a column as a list.
        assert!(fault(&[0x29, 0x1c, 0x49]).contains("wrong type"));
        assert_eq!(sound(&mut &[0x15, 2, 0][..], FOOTER).map_err(|error| error.to_string()), Ok(()));
    }
}
