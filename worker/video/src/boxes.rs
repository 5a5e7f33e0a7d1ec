//! mp4 boxes over a slice: every read is checked, nothing is allocated, nothing recurses.

use crate::error::{Fault, container};

/// A box's type and what stands in it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mp4Box<'a> {
    pub kind: [u8; 4],
    pub body: &'a [u8],
}

/// The boxes that follow one another in `bytes`.
pub(crate) struct Boxes<'a> {
    rest: &'a [u8],
}

impl<'a> Boxes<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The first box of this kind, if there is one.
    pub fn find(bytes: &'a [u8], kind: &[u8; 4]) -> Result<Option<&'a [u8]>, Fault> {
        for found in Self::new(bytes) {
            let found = found?;
            if &found.kind == kind {
                return Ok(Some(found.body));
            }
        }
        Ok(None)
    }

    /// The first box of this kind.
    pub fn need(bytes: &'a [u8], kind: &[u8; 4]) -> Result<&'a [u8], Fault> {
        Self::find(bytes, kind)?.ok_or_else(|| container(format!("no `{}` box", name(kind))))
    }
}

impl<'a> Iterator for Boxes<'a> {
    type Item = Result<Mp4Box<'a>, Fault>;

    fn next(&mut self) -> Option<Self::Item> {
        // QuickTime ends some lists with four zero bytes.
        if self.rest.len() < 8 {
            return None;
        }
        let header = Header::parse(self.rest, self.rest.len() as u64);
        Some(header.map(|header| {
            let (this, rest) = self.rest.split_at(header.total as usize);
            self.rest = rest;
            Mp4Box { kind: header.kind, body: &this[header.header..] }
        }))
        .inspect(|result| {
            if result.is_err() {
                self.rest = &[];
            }
        })
    }
}

/// The head of a box: its type, the bytes of the head, and of the whole.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Header {
    pub kind: [u8; 4],
    pub header: usize,
    pub total: u64,
}

impl Header {
    /// Reads a head at the front of `bytes`; `room` is how far the box may reach.
    pub fn parse(bytes: &[u8], room: u64) -> Result<Self, Fault> {
        let mut cursor = Cursor::new(bytes);
        let small = cursor.u32()?;
        let kind = cursor.array::<4>()?;
        let (header, total) = match small {
            0 => (8, room),
            1 => (16, cursor.u64()?),
            size => (8, u64::from(size)),
        };
        if total < header as u64 || total > room {
            let kind = name(&kind);
            return Err(container(format!("box `{kind}` claims {total} bytes, but only {room} are left")));
        }
        Ok(Self { kind, header, total })
    }
}

/// A four-character code for people: what is not printable becomes `?`.
pub(crate) fn name(kind: &[u8; 4]) -> String {
    kind.iter().map(|&b| if b.is_ascii_graphic() { char::from(b) } else { '?' }).collect()
}

/// Big-endian fields one after another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub fn take(&mut self, n: usize) -> Result<&'a [u8], Fault> {
        let (taken, rest) = self.rest.split_at_checked(n).ok_or_else(|| container("a box ends early"))?;
        self.rest = rest;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    pub fn u8(&mut self) -> Result<u8, Fault> {
        Ok(u8::from_be_bytes(self.array()?))
    }

    pub fn u16(&mut self) -> Result<u16, Fault> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32, Fault> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// The version of a full box; its flags are skipped.
    pub fn version(&mut self) -> Result<u8, Fault> {
        let version = self.u8()?;
        self.take(3)?;
        Ok(version)
    }

    /// A table: a count, then that many entries of `N` bytes, which must all be there.
    pub fn table<const N: usize>(&mut self) -> Result<&'a [[u8; N]], Fault> {
        let count = self.u32()? as usize;
        let bytes = count.checked_mul(N).ok_or_else(|| container("a table is larger than memory"))?;
        Ok(self.take(bytes)?.as_chunks::<N>().0)
    }
}

/// The `n`th big-endian word of a table's entry.
pub(crate) fn word<const N: usize>(entry: &[u8; N], n: usize) -> u32 {
    u32::from_be_bytes([entry[4 * n], entry[4 * n + 1], entry[4 * n + 2], entry[4 * n + 3]])
}
