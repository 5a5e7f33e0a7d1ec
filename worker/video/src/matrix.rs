//! Which way up a video is shown: the display matrices of a movie and of its track.
//!
//! A matrix is nine numbers, `a b u, c d v, x y w`; a point `(p, q)` of a frame is shown at
//! `(a p + c q + x, b p + d q + y)`. Players rotate pictures by it, and so do FFmpeg and LeRobot's decoder.
//! Only whole quarter turns are done here; how large a picture is shown is left alone.

use crate::boxes::Cursor;
use crate::error::{Fault, refused};

/// How a picture is turned before it is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotation {
    /// Not at all.
    None,
    /// By a quarter to the right.
    Right,
    /// By half a turn.
    Half,
    /// By a quarter to the left.
    Left,
}

/// The four numbers of a matrix that turn.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    a: i64,
    b: i64,
    c: i64,
    d: i64,
}

impl Matrix {
    /// From a matrix's nine numbers.
    fn parse(cursor: &mut Cursor<'_>) -> Result<Self, Fault> {
        let mut number = || Ok(i64::from(cursor.u32()? as i32));
        let (a, b, _u, c, d) = (number()?, number()?, number()?, number()?, number()?);
        Ok(Self { a, b, c, d })
    }

    /// The matrix at the end of the head of a movie (`mvhd`), or of a track (`tkhd`), which has more before
    /// it.
    fn of_head(body: &[u8], more: usize) -> Result<Self, Fault> {
        let mut cursor = Cursor::new(body);
        let version = cursor.version()?;
        cursor.take(if version == 1 { 28 } else { 16 } + more)?;
        Self::parse(&mut cursor)
    }

    /// What this one and then `next` do; only signs and zeros of it mean something.
    fn then(self, next: Self) -> Self {
        let product = |x: i64, m: i64, y: i64, n: i64| (x * m).saturating_add(y * n) >> 16;
        Self {
            a: product(self.a, next.a, self.b, next.c),
            b: product(self.a, next.b, self.b, next.d),
            c: product(self.c, next.a, self.d, next.c),
            d: product(self.c, next.b, self.d, next.d),
        }
    }

    fn rotation(self) -> Result<Rotation, Fault> {
        match [self.a, self.b, self.c, self.d].map(i64::signum) {
            // Some writers leave it empty.
            [1, 0, 0, 1] | [0, 0, 0, 0] => Ok(Rotation::None),
            [0, 1, -1, 0] => Ok(Rotation::Right),
            [-1, 0, 0, -1] => Ok(Rotation::Half),
            [0, -1, 1, 0] => Ok(Rotation::Left),
            [_, 0, 0, _] | [0, _, _, 0] => Err(refused("a mirrored video")),
            _ => Err(refused("a video rotated by an angle that is not a multiple of 90 degrees")),
        }
    }
}

/// How pictures of a track are turned, from the heads of the movie and of the track.
pub(crate) fn rotation(mvhd: &[u8], tkhd: &[u8]) -> Result<Rotation, Fault> {
    // Behind the duration: rate, volume and room; of a track room, layer, group and volume.
    let (movie, track) = (Matrix::of_head(mvhd, 16)?, Matrix::of_head(tkhd, 20)?);
    track.then(movie).rotation()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(a: i64, b: i64, c: i64, d: i64) -> Matrix {
        let fixed = |number: i64| number << 16;
        Matrix { a: fixed(a), b: fixed(b), c: fixed(c), d: fixed(d) }
    }

    #[test]
    fn quarter_turns_are_known_and_anything_else_is_refused() {
        let upright = of(1, 0, 0, 1);
        assert_eq!(upright.rotation(), Ok(Rotation::None));
        assert_eq!(of(2, 0, 0, 3).rotation(), Ok(Rotation::None), "larger, and upright");
        let right = of(0, 1, -1, 0);
        assert_eq!(
            (right.rotation(), right.then(upright).rotation()),
            (Ok(Rotation::Right), Ok(Rotation::Right))
        );
        assert_eq!(right.then(right).rotation(), Ok(Rotation::Half));
        assert_eq!(right.then(right).then(right).rotation(), Ok(Rotation::Left));
        for (odd, what) in
            [(of(-1, 0, 0, 1), "mirrored"), (of(0, 1, 1, 0), "mirrored"), (of(1, 1, -1, 1), "angle")]
        {
            let fault = odd.rotation().unwrap_err().to_string();
            assert!(fault.contains(what) && fault.contains("ffmpeg"), "{fault}");
        }
    }
}
