//! Reading traces.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use crate::{Error, Result};

/// One line of a trace. Block names are replaced by slots in `0..Trace::slots()`, so that a replay needs no
/// lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceOp {
    /// Allocate `bytes` on the stream with ordinal `stream`, and keep the block in `slot`.
    Alloc {
        /// Where the replay keeps the block.
        slot: u32,
        /// Size in bytes.
        bytes: u64,
        /// Ordinal of the stream.
        stream: u16,
    },
    /// Free in order.
    Free {
        /// Where the replay keeps the block.
        slot: u32,
    },
    /// Free without order.
    FreeUnordered {
        /// Where the replay keeps the block.
        slot: u32,
    },
    /// Use on another stream.
    Record {
        /// Where the replay keeps the block.
        slot: u32,
        /// Ordinal of the other stream.
        stream: u16,
    },
    /// A commit of all ranks.
    Commit,
    /// Release of free segments.
    Trim,
}

/// A trace in memory.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    pub(super) ops: Vec<TraceOp>,
    pub(super) slots: u32,
    pub(super) peak_live: u64,
}

/// The longest line that is accepted, so that input without line ends does not fill memory.
const MAX_LINE: u64 = 4096;

impl Trace {
    /// Reads a trace from a file, plain or gzip, which is recognised by its content.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path)
            .map_err(|error| Error::system(format!("opening trace {}", path.display()), error))?;
        Self::read(file).map_err(|error| error.context(format!("trace {}", path.display())))
    }

    /// Reads a trace, plain or gzip. The error for an invalid line names its number.
    pub fn read(input: impl Read) -> Result<Self> {
        let mut input = BufReader::with_capacity(1 << 16, input);
        let start = input.fill_buf().map_err(|error| Error::system("reading the trace", error))?;
        if start.starts_with(&[0x1f, 0x8b]) {
            Self::parse(BufReader::new(MultiGzDecoder::new(input)))
        } else {
            Self::parse(input)
        }
    }

    /// The operations, in order.
    pub fn ops(&self) -> &[TraceOp] {
        &self.ops
    }

    /// The largest number of blocks that exist at the same time: the size of a replay's table.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// The most bytes in use at one time, by the sizes in the trace.
    pub fn peak_live(&self) -> u64 {
        self.peak_live
    }

    fn parse(mut input: impl BufRead) -> Result<Self> {
        let mut parser = Parser::default();
        let mut line = String::new();
        for number in 1_u64.. {
            line.clear();
            let read = (&mut input).take(MAX_LINE).read_line(&mut line);
            let read = read.map_err(|error| {
                Error::invalid_argument(format!("line {number}: cannot be read: {error}"))
            })?;
            if read == 0 {
                break;
            }
            if read as u64 == MAX_LINE {
                return Err(Error::invalid_argument(format!(
                    "line {number}: longer than {MAX_LINE} bytes"
                )));
            }
            parser
                .line(line.trim_end_matches(['\n', '\r']))
                .map_err(|what| Error::invalid_argument(format!("line {number}: {what}")))?;
        }
        if parser.header {
            Ok(parser.trace)
        } else {
            Err(Error::invalid_argument("line 1: expected the header op,id,bytes,stream"))
        }
    }
}

#[derive(Default)]
struct Parser {
    trace: Trace,
    header: bool,
    /// Name to slot and size of live blocks.
    live: BTreeMap<u64, (u32, u64)>,
    free_slots: Vec<u32>,
    live_bytes: u64,
}

impl Parser {
    fn line(&mut self, line: &str) -> Result<(), String> {
        if !self.header {
            if line.trim() != "op,id,bytes,stream" {
                return Err(format!("expected the header op,id,bytes,stream, found {line:?}"));
            }
            self.header = true;
            return Ok(());
        }
        if line.trim().is_empty() {
            return Ok(());
        }
        let mut columns = line.split(',').map(str::trim);
        let op = columns.next().unwrap_or_default();
        let (id, bytes, stream) = (columns.next(), columns.next(), columns.next());
        if columns.next().is_some() {
            return Err(format!("more than 4 columns in {line:?}"));
        }
        let op = match op {
            "alloc" => self.alloc(id, bytes, stream)?,
            "free" => TraceOp::Free { slot: self.end(id)? },
            "free_unordered" => TraceOp::FreeUnordered { slot: self.end(id)? },
            "record" => TraceOp::Record { slot: self.slot(id)?.0, stream: ordinal(stream)? },
            "commit" => TraceOp::Commit,
            "trim" => TraceOp::Trim,
            other => {
                return Err(format!(
                    "unknown op {other:?}; expected alloc, free, free_unordered, record, commit or \
                     trim"
                ));
            }
        };
        self.trace.ops.push(op);
        Ok(())
    }

    fn alloc(
        &mut self,
        id: Option<&str>,
        bytes: Option<&str>,
        stream: Option<&str>,
    ) -> Result<TraceOp, String> {
        let id = number("id", id)?;
        let bytes = number("bytes", bytes)?;
        let stream = ordinal(stream)?;
        if self.live.contains_key(&id) {
            return Err(format!("id {id} is allocated already"));
        }
        let total = self.live_bytes.checked_add(bytes);
        self.live_bytes = total.ok_or_else(|| format!("bytes {bytes} overflow the total"))?;
        self.trace.peak_live = self.trace.peak_live.max(self.live_bytes);
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.trace.slots += 1;
            self.trace.slots - 1
        });
        self.live.insert(id, (slot, bytes));
        Ok(TraceOp::Alloc { slot, bytes, stream })
    }

    fn slot(&self, id: Option<&str>) -> Result<(u32, u64), String> {
        let id = number("id", id)?;
        self.live.get(&id).copied().ok_or_else(|| format!("id {id} is not allocated"))
    }

    fn end(&mut self, id: Option<&str>) -> Result<u32, String> {
        let (slot, bytes) = self.slot(id)?;
        self.live.remove(&number("id", id)?);
        self.live_bytes -= bytes;
        self.free_slots.push(slot);
        Ok(slot)
    }
}

fn number(column: &str, text: Option<&str>) -> Result<u64, String> {
    let text = text.unwrap_or_default();
    text.parse().map_err(|_| format!("{column} {text:?} is not a whole number below 2^64"))
}

fn ordinal(text: Option<&str>) -> Result<u16, String> {
    match text.unwrap_or_default() {
        "" => Ok(0),
        text => match text.parse() {
            Ok(stream) if stream < 64 => Ok(stream),
            _ => Err(format!("stream {text:?} is not an ordinal from 0 to 63")),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const SMALL: &str = "op,id,bytes,stream\nalloc,7,1000,0\nalloc,9,24,1\nrecord,7,,1\n\
                         free,7,,\ncommit,,,\nfree_unordered,9\ntrim\n";

    #[test]
    fn reads_plain_and_gzip_alike() {
        let plain = Trace::read(SMALL.as_bytes()).unwrap();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(SMALL.as_bytes()).unwrap();
        let gzip = Trace::read(&gzip.finish().unwrap()[..]).unwrap();
        assert_eq!(plain.ops(), gzip.ops());
        assert_eq!(plain.peak_live(), 1024);
        assert_eq!(plain.slots(), 2);
        assert_eq!(
            plain.ops()[..3],
            [
                TraceOp::Alloc { slot: 0, bytes: 1000, stream: 0 },
                TraceOp::Alloc { slot: 1, bytes: 24, stream: 1 },
                TraceOp::Record { slot: 0, stream: 1 },
            ]
        );
    }

    #[test]
    fn a_bad_line_is_refused_with_its_number() {
        for (lines, number, what) in [
            ("nonsense\n", 1, "header"),
            ("", 1, "header"),
            ("op,id,bytes,stream\nalloc,1,x,0\n", 2, "bytes \"x\""),
            ("op,id,bytes,stream\nalloc,1,5,0\nalloc,1,5,0\n", 3, "id 1 is allocated"),
            ("op,id,bytes,stream\nfree,1,5,0\n", 2, "id 1 is not allocated"),
            ("op,id,bytes,stream\nalloc,1,-5,0\n", 2, "bytes \"-5\""),
            ("op,id,bytes,stream\nalloc,1,5,64\n", 2, "stream \"64\""),
            ("op,id,bytes,stream\nalloc,1,18446744073709551615,0\nalloc,2,1,0\n", 3, "overflow"),
            ("op,id,bytes,stream\n\n\nboom\n", 4, "unknown op \"boom\""),
            ("op,id,bytes,stream\nalloc,1,5,0,9\n", 2, "more than 4"),
        ] {
            let error = Trace::read(lines.as_bytes()).unwrap_err();
            assert!(error.is_invalid_argument());
            let message = error.to_string();
            assert!(message.contains(&format!("line {number}: ")), "{message}");
            assert!(message.contains(what), "{message}");
        }
        let long = format!("op,id,bytes,stream\n{}\n", "x".repeat(1 << 20));
        assert!(Trace::read(long.as_bytes()).unwrap_err().to_string().contains("line 2: longer"));
        assert!(Trace::read(&[0xff, 0xfe][..]).is_err());
        assert!(Trace::read(&[0x1f, 0x8b, 0, 0][..]).is_err());
    }
}
