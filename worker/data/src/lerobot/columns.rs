//! From a column's values and levels to flat numbers and encoded images, with every row's shape checked.

use std::ops::Range;

use parquet::{
    basic::{ConvertedType, LogicalType, Repetition, SortOrder},
    column::reader::ColumnReader,
    errors::ParquetError,
    schema::types::{ColumnDescriptor, Type},
};

use super::tables::{Column, Values, is_text};

/// A row that does not have the shape that `info.json` promises.
#[derive(Debug, PartialEq, Eq)]
pub struct RowFault {
    /// Row within the rows asked for.
    pub row: usize,
    /// What is wrong.
    pub fault: String,
}

/// Why a column cannot be had.
#[derive(Debug)]
pub enum ColumnFault {
    /// The file is broken.
    File(ParquetError),
    /// A row is.
    Row(RowFault),
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

impl From<RowFault> for ColumnFault {
    fn from(fault: RowFault) -> Self {
        Self::Row(fault)
    }
}

/// Of the column as a whole.
fn wrong(fault: String) -> ColumnFault {
    ColumnFault::Row(RowFault { row: 0, fault })
}

/// All rows of `column` as `rows * product(shape)` numbers. A feature of shape `[1]` may be stored without a
/// list.
pub fn numbers(column: &Column<'_>, shape: &[usize]) -> Result<Vec<f32>, ColumnFault> {
    let stored = stored(column.descriptor());
    let Some(lists) = Lists::of(column.root()) else {
        return Err(wrong(format!("stored as groups of {stored}, info.json says shape {shape:?}")));
    };
    let depth = lists.with_item.len();
    if depth > shape.len() || shape[depth..].iter().product::<usize>() != 1 {
        let fault = format!("stored as {stored} in {depth} lists, info.json says shape {shape:?}");
        return Err(wrong(fault));
    }
    let Some(values) = floats(column)? else {
        return Err(wrong(format!("stored as {stored}, not numbers")));
    };
    lists.check(&values, &shape[..depth])?;
    let (found, rows) = (values.present.len(), column.rows.count);
    match found == rows * shape.iter().product::<usize>() {
        true => Ok(values.present),
        false => Err(wrong(format!("{found} numbers in {rows} rows, info.json says shape {shape:?}"))),
    }
}

/// All values as numbers, or `None` if they are none.
fn floats(column: &Column<'_>) -> Result<Option<Values<f32>>, ParquetError> {
    let descriptor = column.descriptor();
    let unsigned = descriptor.sort_order() == SortOrder::UNSIGNED;
    if is_decimal(descriptor) {
        return Ok(None);
    }
    Ok(Some(match column.reader()? {
        ColumnReader::FloatColumnReader(r) => column.read(r, |v| v)?,
        ColumnReader::DoubleColumnReader(r) => column.read(r, |v| v as f32)?,
        ColumnReader::Int32ColumnReader(r) if unsigned => column.read(r, |v| v as u32 as f32)?,
        ColumnReader::Int32ColumnReader(r) => column.read(r, |v| v as f32)?,
        ColumnReader::Int64ColumnReader(r) if unsigned => column.read(r, |v| v as u64 as f32)?,
        ColumnReader::Int64ColumnReader(r) => column.read(r, |v| v as f32)?,
        ColumnReader::BoolColumnReader(r) => column.read(r, |v| f32::from(u8::from(v)))?,
        ColumnReader::FixedLenByteArrayColumnReader(r) if is_half(descriptor) => {
            column.read(r, |v| half::f16::from_le_bytes([v.data()[0], v.data()[1]]).to_f32())?
        }
        _ => return Ok(None),
    }))
}

/// All rows of an integer column.
pub fn integers(column: &Column<'_>) -> Result<Vec<i64>, ColumnFault> {
    let descriptor = column.descriptor();
    let not_integers = || wrong(format!("stored as {}, not integers", stored(descriptor)));
    if descriptor.max_rep_level() > 0 || is_decimal(descriptor) {
        return Err(not_integers());
    }
    let unsigned = descriptor.sort_order() == SortOrder::UNSIGNED;
    // A table that had a gap when pandas wrote it has its integers as floating point numbers.
    let whole = |v: f64| v.is_finite().then_some(v as i64);
    let rows = match column.reader()? {
        ColumnReader::Int64ColumnReader(r) => column.by_row(r, Some)?,
        ColumnReader::Int32ColumnReader(r) if unsigned => column.by_row(r, |v| Some(i64::from(v as u32)))?,
        ColumnReader::Int32ColumnReader(r) => column.by_row(r, |v| Some(i64::from(v)))?,
        ColumnReader::BoolColumnReader(r) => column.by_row(r, |v| Some(i64::from(v)))?,
        ColumnReader::FloatColumnReader(r) => column.by_row(r, |v| whole(f64::from(v)))?,
        ColumnReader::DoubleColumnReader(r) => column.by_row(r, whole)?,
        _ => return Err(not_integers()),
    };
    let all: Option<Vec<i64>> = rows.iter().copied().collect();
    all.ok_or_else(|| {
        let row = rows.iter().position(Option::is_none).unwrap_or(0);
        RowFault { row, fault: "missing (null)".into() }.into()
    })
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
            return Err(wrong(format!(
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

fn is_decimal(descriptor: &ColumnDescriptor) -> bool {
    matches!(descriptor.logical_type_ref(), Some(LogicalType::Decimal(_)))
        || descriptor.converted_type() == ConvertedType::DECIMAL
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
    fn check<V>(&self, values: &Values<V>, shape: &[usize]) -> Result<(), RowFault> {
        let per_row: usize = shape.iter().product();
        let complete = values.definition.iter().all(|level| *level == self.with_value);
        let row = begun_in_a_row(shape);
        if complete && per_row > 0 && values.repetition.chunks(per_row).all(|levels| levels == row) {
            return Ok(());
        }
        for axis in 0..shape.len() {
            self.check_axis(values, shape, axis)?;
        }
        let item = self.with_item.last().copied().unwrap_or(0);
        let mut places = values.definition.iter().filter(|level| **level >= item);
        match places.position(|level| *level < self.with_value) {
            Some(at) => Err(RowFault { row: at / per_row.max(1), fault: "a value is missing (null)".into() }),
            None => Ok(()),
        }
    }

    /// Whether all lists at depth `axis` have as many items as the shape says. Those around them do.
    fn check_axis<V>(&self, values: &Values<V>, shape: &[usize], axis: usize) -> Result<(), RowFault> {
        let per_row = shape[..axis].iter().product::<usize>().max(1);
        let wanted = shape[axis];
        let expect = |list: usize, found: usize| match found == wanted {
            true => Ok(()),
            false => Err(RowFault {
                row: list / per_row,
                fault: format!("axis {axis} has {found} elements, info.json says {wanted}"),
            }),
        };
        let around = axis.checked_sub(1).map_or(0, |outer| self.with_item[outer]);
        let (mut lists, mut items) = (0usize, 0);
        for (definition, repetition) in values.definition.iter().zip(&values.repetition) {
            if usize::try_from(*repetition).is_ok_and(|level| level <= axis) && *definition >= around {
                if lists > 0 {
                    expect(lists - 1, items)?;
                }
                (lists, items) = (lists + 1, 0);
            }
            let begins = usize::try_from(*repetition).is_ok_and(|level| level <= axis + 1);
            items += usize::from(begins && *definition >= self.with_item[axis]);
        }
        match lists {
            0 => Ok(()),
            _ => expect(lists - 1, items),
        }
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

    fn values(definition: &[i16], repetition: &[i16]) -> Values<()> {
        let (definition, repetition) = (definition.to_vec(), repetition.to_vec());
        Values { present: Vec::new(), definition, repetition }
    }

    fn fault(values: &Values<()>, lists: &Lists, shape: &[usize]) -> (usize, String) {
        let RowFault { row, fault } = lists.check(values, shape).unwrap_err();
        (row, fault)
    }

    #[test]
    fn nested_lists_are_in_order_row_by_row() {
        assert_eq!(begun_in_a_row(&[]), [0]);
        assert_eq!(begun_in_a_row(&[3]), [0, 1, 1]);
        assert_eq!(begun_in_a_row(&[2, 3]), [0, 2, 2, 1, 2, 2]);
        assert_eq!(begun_in_a_row(&[2, 1, 2]), [0, 3, 1, 3]);
        let two_rows = values(&[2; 8], &[0, 2, 1, 2, 0, 2, 1, 2]);
        assert_eq!(lists(2).check(&two_rows, &[2, 2]), Ok(()));
    }

    #[test]
    fn a_row_of_another_shape_is_named() {
        let short = values(&[2; 7], &[0, 2, 1, 2, 0, 2, 1]);
        assert_eq!(fault(&short, &lists(2), &[2, 2]), (1, "axis 1 has 1 elements, info.json says 2".into()));
        let long = values(&[2; 6], &[0, 2, 1, 2, 1, 2]);
        assert_eq!(fault(&long, &lists(2), &[2, 2]), (0, "axis 0 has 3 elements, info.json says 2".into()));
        let empty_inside = values(&[2, 2, 1], &[0, 2, 1]);
        let says = "axis 1 has 0 elements, info.json says 2".into();
        assert_eq!(fault(&empty_inside, &lists(2), &[2, 2]), (0, says));
        let empty_row = values(&[1, 1, 0], &[0, 1, 0]);
        assert_eq!(fault(&empty_row, &lists(1), &[2]), (1, "axis 0 has 0 elements, info.json says 2".into()));
    }

    #[test]
    fn a_missing_value_is_named_by_its_row_and_a_missing_list_by_its_length() {
        let nullable = Lists { with_item: vec![2], with_value: 3 };
        let missing = (1, "a value is missing (null)".to_string());
        assert_eq!(fault(&values(&[3, 3, 3, 2], &[0, 1, 0, 1]), &nullable, &[2]), missing);
        let no_list = (1, "axis 0 has 0 elements, info.json says 2".to_string());
        assert_eq!(fault(&values(&[3, 3, 0], &[0, 1, 0]), &nullable, &[2]), no_list);
        let scalar = Lists { with_item: Vec::new(), with_value: 1 };
        assert_eq!(fault(&values(&[1, 0], &[]), &scalar, &[]), missing);
    }
}
