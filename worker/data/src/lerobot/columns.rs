//! From a column's values and levels to flat numbers and encoded images, with every row's shape checked.

use std::{fmt, ops::Range};

use parquet::{
    basic::{ConvertedType, LogicalType, Repetition, SortOrder},
    column::reader::ColumnReader,
    errors::ParquetError,
    schema::types::{ColumnDescriptor, Type},
};

use super::tables::{Column, Values, is_decimal, is_text};

/// A row that does not have the shape that `info.json` promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowFault {
    /// Row within the rows asked for.
    pub row: usize,
    /// What is wrong.
    pub misfit: Misfit,
}

/// How a row's value differs from what `info.json` promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// A value, or all of them, is null.
    Missing,
    /// A list has another length.
    Length {
        /// Which of the value's axes it is.
        axis: usize,
        /// Elements.
        found: usize,
        /// Elements that it should have.
        wanted: usize,
    },
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("a value is missing (null)"),
            Self::Length { axis, found, wanted } => {
                write!(f, "axis {axis} has length {found}, but info.json says {wanted}")
            }
        }
    }
}

/// Why a column cannot be had.
#[derive(Debug)]
pub enum ColumnFault {
    /// The file is broken.
    File(ParquetError),
    /// The column holds something else, in every row asked for.
    Column(String),
    /// These are too many bytes at once; so many rows fit.
    TooLarge {
        /// At least one.
        rows: usize,
    },
}

impl From<ParquetError> for ColumnFault {
    fn from(error: ParquetError) -> Self {
        Self::File(error)
    }
}

/// What stands for an integer that is missing: no episode, frame or task has this number.
pub const NO_INTEGER: i64 = i64::MIN;

/// What helps where a column is of another type than its feature.
const REMEDY: &str = "; re-export the data set to match info.json, or correct info.json";

/// All rows of `column` as `rows * product(shape)` numbers, NaN in those that have another shape, which are
/// named. A feature of shape `[1]` may be stored without a list.
pub fn numbers(column: &Column<'_>, shape: &[usize]) -> Result<(Vec<f32>, Vec<RowFault>), ColumnFault> {
    let (stored, wrong) = (stored(column.descriptor()), ColumnFault::Column);
    let Some(lists) = Lists::of(column.root()) else {
        return Err(wrong(format!(
            "stored as structs of {stored}, but info.json says shape {shape:?}{REMEDY}"
        )));
    };
    let depth = lists.with_item.len();
    if depth > shape.len() || shape[depth..].iter().product::<usize>() != 1 {
        let fault =
            format!("stored as {depth}-dimensional {stored}, but info.json says shape {shape:?}{REMEDY}");
        return Err(wrong(fault));
    }
    let Some(values) = floats(column)? else {
        return Err(wrong(format!("stored as {stored}, not numbers{REMEDY}")));
    };
    let (found, rows) = (values.present.len(), column.rows.count);
    if lists.are_whole(&values, &shape[..depth]) {
        return match found == rows * shape.iter().product::<usize>() {
            true => Ok((values.present, Vec::new())),
            false => {
                Err(wrong(format!("{found} numbers in {rows} rows, but info.json says shape {shape:?}")))
            }
        };
    }
    lists.row_by_row(&values, &shape[..depth])
}

/// All values as numbers, or `None` if they are none.
fn floats(column: &Column<'_>) -> Result<Option<Values<f32>>, ParquetError> {
    let descriptor = column.descriptor();
    let unsigned = descriptor.sort_order() == SortOrder::UNSIGNED;
    if is_decimal(descriptor) {
        return Ok(None);
    }
    Ok(Some(match column.reader()? {
        ColumnReader::FloatColumnReader(r) => column.read_values(r, |v| v)?,
        ColumnReader::DoubleColumnReader(r) => column.read_values(r, |v| v as f32)?,
        ColumnReader::Int32ColumnReader(r) if unsigned => column.read_values(r, |v| v as u32 as f32)?,
        ColumnReader::Int32ColumnReader(r) => column.read_values(r, |v| v as f32)?,
        ColumnReader::Int64ColumnReader(r) if unsigned => column.read_values(r, |v| v as u64 as f32)?,
        ColumnReader::Int64ColumnReader(r) => column.read_values(r, |v| v as f32)?,
        ColumnReader::BoolColumnReader(r) => column.read_values(r, |v| f32::from(u8::from(v)))?,
        ColumnReader::FixedLenByteArrayColumnReader(r) if is_half(descriptor) => {
            column.read_values(r, |v| half::f16::from_le_bytes([v.data()[0], v.data()[1]]).to_f32())?
        }
        _ => return Ok(None),
    }))
}

/// All rows of an integer column, [`NO_INTEGER`] in those that are null, which are named.
pub fn integers(column: &Column<'_>) -> Result<(Vec<i64>, Vec<RowFault>), ColumnFault> {
    let descriptor = column.descriptor();
    let not_integers =
        || ColumnFault::Column(format!("stored as {}, not integers{REMEDY}", stored(descriptor)));
    let rows = column.integers()?.ok_or_else(not_integers)?;
    let missing = rows.iter().enumerate().filter(|(_, value)| value.is_none());
    let faults: Vec<_> = missing.map(|(row, _)| RowFault { row, misfit: Misfit::Missing }).collect();
    match faults.len() == rows.len() {
        true if !rows.is_empty() => Err(ColumnFault::Column(Misfit::Missing.to_string())),
        _ => Ok((rows.into_iter().map(|value| value.unwrap_or(NO_INTEGER)).collect(), faults)),
    }
}

/// Encoded images, one after the other.
#[derive(Debug, Default)]
pub struct Images {
    bytes: Vec<u8>,
    /// Where each row's image lies; `None` if it has none.
    rows: Vec<Option<Range<usize>>>,
}

impl Images {
    /// The image in row `row`; `None` if it has none.
    pub fn get(&self, row: usize) -> Option<&[u8]> {
        self.rows.get(row)?.clone().map(|range| &self.bytes[range])
    }

    /// Memory they take.
    pub fn bytes(&self) -> usize {
        self.bytes.capacity() + self.rows.capacity() * size_of::<Option<Range<usize>>>()
    }
}

/// The encoded images of an image column: LeRobot stores a struct of `bytes` and `path`, others the bytes
/// alone. Copied out of their pages, which hold more rows than these. Several rows of far more than
/// `expected` bytes are too large; one may have any number.
pub fn images(column: &Column<'_>, expected: u64) -> Result<Images, ColumnFault> {
    let descriptor = column.descriptor();
    let encoded = match column.reader()? {
        ColumnReader::ByteArrayColumnReader(r) if !is_text(descriptor) && descriptor.max_rep_level() == 0 => {
            r
        }
        _ => {
            let stored = stored(descriptor);
            return Err(ColumnFault::Column(format!(
                "stored as {stored}, expected encoded image bytes; re-export the data set"
            )));
        }
    };
    // Honest footers are off by what rows differ from each other.
    let most = expected.saturating_mul(4);
    let mut images = Images::default();
    let mut narrower = None;
    column.each(encoded, |image| {
        let start = images.bytes.len();
        images.rows.push(image.map(|image| {
            images.bytes.extend_from_slice(image.data());
            start..images.bytes.len()
        }));
        let (bytes, rows) = (images.bytes.len() as u64, images.rows.len());
        if rows > 1 && bytes > most {
            narrower = Some((rows as u64 * expected / bytes).max(1) as usize);
        }
        narrower.is_none()
    })?;
    if let Some(rows) = narrower {
        return Err(ColumnFault::TooLarge { rows });
    }
    images.bytes.shrink_to_fit();
    images.rows.shrink_to_fit();
    Ok(images)
}

/// What a column's values are, as messages say it.
fn stored(descriptor: &ColumnDescriptor) -> String {
    match descriptor.converted_type() {
        ConvertedType::NONE => descriptor.physical_type().to_string(),
        converted => converted.to_string(),
    }
}

fn is_half(descriptor: &ColumnDescriptor) -> bool {
    descriptor.logical_type_ref() == Some(&LogicalType::Float16) && descriptor.type_length() == 2
}

/// The lists that a column's values lie in.
struct Lists {
    /// By list, the outermost first: the definition level from which on it has an item.
    with_item: Vec<i16>,
    /// The definition level of a value.
    with_value: i16,
}

impl Lists {
    /// `None` if `root` is something else than values in lists.
    fn of(root: &Type) -> Option<Self> {
        let mut lists = Self { with_item: Vec::new(), with_value: 0 };
        let mut node = root;
        loop {
            let info = node.get_basic_info();
            lists.with_value += i16::from(info.repetition() != Repetition::REQUIRED);
            let repeated = info.repetition() == Repetition::REPEATED;
            if repeated {
                lists.with_item.push(lists.with_value);
            }
            if node.is_primitive() {
                return Some(lists);
            }
            let is_list = repeated
                || info.converted_type() == ConvertedType::LIST
                || info.logical_type_ref() == Some(&LogicalType::List);
            match node.get_fields() {
                [only] if is_list => node = only,
                _ => return None,
            }
        }
    }

    /// Whether every row has a value in every place of `shape`, which has an axis for every list.
    fn are_whole<V>(&self, values: &Values<V>, shape: &[usize]) -> bool {
        let per_row: usize = shape.iter().product();
        let complete = values.definition.iter().all(|level| *level == self.with_value);
        let row = begun_in_a_row(shape);
        complete && per_row > 0 && values.repetition.chunks(per_row).all(|levels| levels == row)
    }

    /// The values of rows that have this shape, NaN in the place of the others, which are named. An error
    /// where no row has it.
    fn row_by_row(
        &self,
        values: &Values<f32>,
        shape: &[usize],
    ) -> Result<(Vec<f32>, Vec<RowFault>), ColumnFault> {
        let mut rows = Vec::new();
        let (mut level, mut value) = (0, 0);
        while level < values.definition.len() {
            let others = values.repetition.iter().skip(level + 1);
            let more = others.take_while(|repetition| **repetition > 0).count();
            let here = level..level + 1 + more;
            let definition = &values.definition[here.clone()];
            let there = definition.iter().filter(|level| **level == self.with_value).count();
            let misfit = self.misfit(definition, values.repetition.get(here.clone()).unwrap_or(&[]), shape);
            rows.push(misfit.map_or(Ok(value..value + there), Err));
            (level, value) = (here.end, value + there);
        }
        let fault = |(row, found): (usize, &Result<_, Misfit>)| {
            found.as_ref().err().map(|misfit| RowFault { row, misfit: *misfit })
        };
        let faults: Vec<_> = rows.iter().enumerate().filter_map(fault).collect();
        if let Some(first) = faults.first().filter(|_| faults.len() == rows.len()) {
            return Err(ColumnFault::Column(first.misfit.to_string()));
        }
        let width = shape.iter().product::<usize>();
        let mut numbers = Vec::with_capacity(rows.len() * width);
        for row in rows {
            match row {
                Ok(here) => numbers.extend_from_slice(&values.present[here]),
                Err(_) => numbers.resize(numbers.len() + width, f32::NAN),
            }
        }
        Ok((numbers, faults))
    }

    /// What of a row's levels is not as the shape says.
    fn misfit(&self, definition: &[i16], repetition: &[i16], shape: &[usize]) -> Option<Misfit> {
        let axes = (0..shape.len()).find_map(|axis| self.other_length(definition, repetition, shape, axis));
        let item = self.with_item.last().copied().unwrap_or(0);
        let is_missing = |level: &i16| (item..self.with_value).contains(level);
        axes.or_else(|| definition.iter().any(is_missing).then_some(Misfit::Missing))
    }

    /// A list of the row at depth `axis` that does not have as many items as the shape says. Those around
    /// them do.
    fn other_length(
        &self,
        definition: &[i16],
        repetition: &[i16],
        shape: &[usize],
        axis: usize,
    ) -> Option<Misfit> {
        let wanted = shape[axis];
        let other = |found: usize| (found != wanted).then_some(Misfit::Length { axis, found, wanted });
        let around = axis.checked_sub(1).map_or(0, |outer| self.with_item[outer]);
        let mut items: Option<usize> = None;
        for (definition, repetition) in definition.iter().zip(repetition) {
            let depth = usize::try_from(*repetition).unwrap_or(usize::MAX);
            if depth <= axis && *definition >= around {
                if let Some(misfit) = items.and_then(other) {
                    return Some(misfit);
                }
                items = Some(0);
            }
            let is_item = depth <= axis + 1 && *definition >= self.with_item[axis];
            items = items.map(|items| items + usize::from(is_item));
        }
        items.and_then(other)
    }
}

/// The repetition levels of a row that has all its values.
fn begun_in_a_row(shape: &[usize]) -> Vec<i16> {
    let mut levels = vec![0];
    for (depth, axis) in shape.iter().enumerate().rev() {
        let mut again = levels.clone();
        again[0] = depth as i16 + 1;
        (1..*axis).for_each(|_| levels.extend_from_slice(&again));
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists in which nothing can be null, in as many levels as `shape` has axes.
    fn lists(depth: i16) -> Lists {
        Lists { with_item: (1..=depth).collect(), with_value: depth }
    }

    fn values(definition: &[i16], repetition: &[i16]) -> Values<f32> {
        let present = definition.iter().filter(|level| **level == *definition.iter().max().unwrap());
        let present = present.enumerate().map(|(at, _)| at as f32).collect();
        Values { present, definition: definition.to_vec(), repetition: repetition.to_vec() }
    }

    /// The rows that differ, and how.
    fn faults(values: &Values<f32>, lists: &Lists, shape: &[usize]) -> Vec<(usize, String)> {
        assert!(!lists.are_whole(values, shape));
        let (numbers, faults) = lists.row_by_row(values, shape).unwrap();
        let width = shape.iter().product::<usize>();
        for (row, numbers) in numbers.chunks(width).enumerate() {
            let is_odd = faults.iter().any(|fault| fault.row == row);
            assert!(numbers.iter().all(|number| number.is_nan() == is_odd), "row {row}: {numbers:?}");
        }
        faults.into_iter().map(|RowFault { row, misfit }| (row, misfit.to_string())).collect()
    }

    #[test]
    fn nested_lists_are_in_order_row_by_row() {
        assert_eq!(begun_in_a_row(&[]), [0]);
        assert_eq!(begun_in_a_row(&[3]), [0, 1, 1]);
        assert_eq!(begun_in_a_row(&[2, 3]), [0, 2, 2, 1, 2, 2]);
        assert_eq!(begun_in_a_row(&[2, 1, 2]), [0, 3, 1, 3]);
        let two_rows = values(&[2; 8], &[0, 2, 1, 2, 0, 2, 1, 2]);
        assert!(lists(2).are_whole(&two_rows, &[2, 2]));
    }

    #[test]
    fn rows_of_another_shape_are_named_and_the_others_are_read() {
        let length = |axis, found| format!("axis {axis} has length {found}, but info.json says 2");
        let short = values(&[2; 7], &[0, 2, 1, 2, 0, 2, 1]);
        assert_eq!(faults(&short, &lists(2), &[2, 2]), [(1, length(1, 1))]);
        let long = values(&[2; 10], &[0, 2, 1, 2, 1, 2, 0, 2, 1, 2]);
        assert_eq!(faults(&long, &lists(2), &[2, 2]), [(0, length(0, 3))]);
        let empty_inside = values(&[2, 2, 1, 2, 2, 2, 2], &[0, 2, 1, 0, 2, 1, 2]);
        assert_eq!(faults(&empty_inside, &lists(2), &[2, 2]), [(0, length(1, 0))]);
        let empty_rows = values(&[0, 1, 1, 0, 1, 1], &[0, 0, 1, 0, 0, 1]);
        assert_eq!(faults(&empty_rows, &lists(1), &[2]), [(0, length(0, 0)), (2, length(0, 0))]);
        let (numbers, _) = lists(1).row_by_row(&empty_rows, &[2]).unwrap();
        assert_eq!((&numbers[2..4], &numbers[6..]), (&[0.0, 1.0][..], &[2.0, 3.0][..]));
    }

    #[test]
    fn a_missing_value_is_named_by_its_row_and_a_missing_list_by_its_length() {
        let nullable = Lists { with_item: vec![2], with_value: 3 };
        let missing = (1, "a value is missing (null)".to_string());
        assert_eq!(
            faults(&values(&[3, 3, 3, 2], &[0, 1, 0, 1]), &nullable, &[2]),
            std::slice::from_ref(&missing)
        );
        let no_list = (1, "axis 0 has length 0, but info.json says 2".to_string());
        assert_eq!(faults(&values(&[3, 3, 0], &[0, 1, 0]), &nullable, &[2]), [no_list]);
        let scalar = Lists { with_item: Vec::new(), with_value: 1 };
        assert_eq!(faults(&values(&[1, 0], &[]), &scalar, &[]), [missing]);
    }

    #[test]
    fn a_column_of_which_no_row_has_the_shape_is_refused_as_a_whole() {
        let short = values(&[1, 1], &[0, 0]);
        let found = lists(1).row_by_row(&short, &[1 << 28]);
        assert!(matches!(&found, Err(ColumnFault::Column(fault)) if fault.contains("has length 1")));
    }
}
