//! What layouts hold, and which arguments are refused.

use crate::{Case, Rank, STREAM, element, ranks};
use symmpool_allocator::Error;
use symmpool_collectives::{DType, RowExchange, RowShape, RowsAt};

#[test]
fn sending_back_with_an_unused_layout_gives_zeros() {
    ranks(2, |pool, comm| {
        let rank = Rank::new(pool, comm, 5, 2);
        let layout = rank.exchange.layout().unwrap();
        rank.back.write(&[7; 10]).unwrap();
        rank.exchange.send_back(&layout, &rank.back, &rank.output, STREAM).unwrap();
        assert_eq!(rank.back.read().unwrap(), [0; 10]);
    });
}

#[test]
fn too_few_rows_to_send_back_are_an_error_on_all_and_the_communicator_stays_usable() {
    ranks(3, |pool, comm| {
        let rank = Rank::new(pool, comm, 6, 2);
        let layout = rank.exchange.layout().unwrap();
        let case = Case { destinations: vec![vec![0, 1, 2, 0, 1, 2]; 3], capacities: vec![18; 3] };
        rank.send(&case, &layout, false);
        let rows = RowsAt {
            input: rank.output.as_ptr().cast::<u8>().cast_const(),
            length: if rank.me == 1 { 5 } else { 6 },
            output: rank.back.as_ptr().cast(),
            capacity: 6,
        };
        let layout_at = layout.counts().cast::<u8>().cast_mut();
        // SAFETY: the blocks have these lengths; the layout begins with its counts.
        let error = unsafe { rank.exchange.send_back_at(layout_at, &rows, STREAM) }.unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains("splits of rank 1"), "{error}");
        // The rows of the other ranks came back.
        let wanted: Vec<i32> = (0..6)
            .flat_map(|index| (0..2).map(move |at| (index, at)))
            .map(|(index, at)| if index % 3 == 1 { 0 } else { element(rank.me, index, at) })
            .collect();
        assert_eq!(rank.back.read().unwrap(), wanted);
        rank.send(&case, &layout, true);
        rank.send_back(&case, &layout);
    });
}

#[test]
fn invalid_arguments_are_refused_and_an_error_on_the_others() {
    ranks(2, |pool, comm| {
        let me = pool.rank();
        for shape in [
            RowShape { rows: 1 << 31, row: 1, dtype: DType::U8 },
            RowShape { rows: 1, row: 0, dtype: DType::U8 },
            RowShape { rows: 1, row: usize::MAX, dtype: DType::I32 },
        ] {
            assert!(RowExchange::new(comm, shape).unwrap_err().is_invalid_argument());
        }
        let rank = Rank::new(pool, comm, 4, 2);
        let other = Rank::new(pool, comm, 5, 2);
        let (layout, foreign) = (rank.exchange.layout().unwrap(), other.exchange.layout().unwrap());
        let floats = pool.alloc::<f32>(8).unwrap();
        let (four, five) = (&rank.wide, &other.wide);
        four.write(&[0; 4]).unwrap();
        five.write(&[0; 5]).unwrap();
        let case = Case { destinations: vec![vec![0, 1, -1, 1]; 2], capacities: vec![8; 2] };
        let exchange = &rank.exchange;
        let (input, output) = (&rank.input, &rank.output);
        let rows = |length, capacity| RowsAt {
            input: input.as_ptr().cast::<u8>().cast_const(),
            length,
            output: output.as_ptr().cast(),
            capacity,
        };
        let at = layout.counts().cast::<u8>().cast_mut();
        let given = four.as_ptr().cast::<u8>().cast_const();
        let none = std::ptr::null_mut::<u8>();
        // SAFETY: where the arguments are not refused, which is what is tested, the blocks are longer, and the layout
        // begins with its counts.
        let send_at = |at, rows, given| unsafe { exchange.send_at(at, &rows, given, STREAM) };
        type Wrong<'a> = (&'a str, &'a (dyn Fn() -> Result<(), Error> + 'a));
        let wrong: [Wrong<'_>; 11] = [
            ("f32 where it moves i32", &|| exchange.send(&layout, &floats, &floats, four, STREAM)),
            ("of another shape", &|| exchange.send(&foreign, output, input, four, STREAM)),
            ("5 destinations of i64", &|| {
                exchange.send(&layout, output, &other.input, five, STREAM)
            }),
            ("destinations of f32", &|| exchange.send(&layout, output, input, &floats, STREAM)),
            ("an output of 8 rows", &|| exchange.send_back(&layout, output, output, STREAM)),
            ("input of 1 rows", &|| send_at(at, rows(1, 4), (given, 4, DType::I64))),
            ("4 destinations of i32", &|| {
                send_at(at, rows(4, 8), (given.wrapping_add(1), 4, DType::I32))
            }),
            ("4 destinations of i64 at 0x0", &|| send_at(at, rows(4, 8), (none, 4, DType::I64))),
            ("a layout at 0x0", &|| send_at(none, rows(4, 8), (given, 4, DType::I64))),
            ("there is no such memory", &|| {
                send_at(at, rows(usize::MAX, 8), (given, 4, DType::I64))
            }),
            ("there is no such memory", &|| send_at(at, rows(4, 1 << 50), (given, 4, DType::I64))),
        ];
        for (what, call) in wrong {
            let error = if me == 1 {
                call().unwrap_err()
            } else {
                exchange.send(&layout, output, input, four, STREAM).unwrap_err()
            };
            assert_eq!(error.is_diverged(), me == 0, "{what}: {error}");
            assert_eq!(error.is_invalid_argument(), me == 1, "{what}: {error}");
            assert!(me == 0 || error.to_string().contains(what), "{what}: {error}");
            rank.send(&case, &layout, true);
            rank.send_back(&case, &layout);
        }
        // A refused call on the way back writes nothing either.
        let back = pool.alloc::<i32>(8).unwrap();
        back.write(&[7; 8]).unwrap();
        let out = if me == 1 { output } else { &back };
        let error = exchange.send_back(&layout, out, output, STREAM).unwrap_err();
        assert_eq!((error.is_diverged(), error.is_invalid_argument()), (me == 0, me == 1));
        assert_eq!(back.read().unwrap(), [7; 8]);
        // An empty array of destinations may have any address.
        send_at(at, rows(4, 8), (none, 0, DType::I32)).unwrap();
        assert_eq!(layout.read().unwrap().counts, [0, 0]);
    });
}

#[test]
fn a_layout_may_be_memory_of_the_caller() {
    ranks(2, |pool, comm| {
        let rank = Rank::new(pool, comm, 4, 1);
        let exchange = &rank.exchange;
        let memory = pool.alloc::<u8>(exchange.layout_bytes()).unwrap();
        memory.write(&vec![0xff; memory.len()]).unwrap();
        // SAFETY: the block has this length, and only this rank uses it.
        unsafe { exchange.clear_layout_at(memory.as_ptr()) }.unwrap();
        rank.input.write(&[10, 11, 12, 13]).unwrap();
        rank.narrow.write(&[1, 0, 1, -1]).unwrap();
        rank.back.write(&[7; 4]).unwrap();
        let back = RowsAt {
            input: rank.output.as_ptr().cast::<u8>().cast_const(),
            length: 8,
            output: rank.back.as_ptr().cast(),
            capacity: 4,
        };
        // SAFETY: the blocks have these lengths, and the layout was cleared; so below.
        unsafe { exchange.send_back_at(memory.as_ptr(), &back, STREAM) }.unwrap();
        assert_eq!(rank.back.read().unwrap(), [0; 4], "no rows were exchanged");
        let rows = RowsAt {
            input: rank.input.as_ptr().cast::<u8>().cast_const(),
            length: 4,
            output: rank.output.as_ptr().cast(),
            capacity: 8,
        };
        let given = (rank.narrow.as_ptr().cast::<u8>().cast_const(), 4, DType::I32);
        // SAFETY: as above.
        unsafe { exchange.send_at(memory.as_ptr(), &rows, given, STREAM) }.unwrap();
        let bytes = memory.read().unwrap();
        let word = |at: usize| i64::from_le_bytes(bytes[at..][..8].try_into().unwrap());
        let index = |at: usize| i32::from_le_bytes(bytes[at..][..4].try_into().unwrap());
        let [counts, offsets, indices] = exchange.layout_parts();
        let of_each: &[i32] = if rank.me == 0 { &[1] } else { &[0, 2] };
        let count = of_each.len() as i64;
        assert_eq!([word(counts), word(counts + 8)], [count; 2]);
        assert_eq!([word(offsets), word(offsets + 8)], [0, count]);
        let sources: Vec<i32> =
            (0..2 * of_each.len()).map(|row| index(indices + 4 * row)).collect();
        assert_eq!(sources, [of_each, of_each].concat());
        // A layout that the exchange allocates has its parts at the same places.
        let layout = exchange.layout().unwrap();
        let begin = layout.counts() as usize - counts;
        assert_eq!(layout.offsets() as usize, begin + offsets);
        assert_eq!(layout.source_index() as usize, begin + indices);
    });
}

#[test]
fn exchanges_and_layouts_free_their_memory() {
    ranks(2, |pool, comm| {
        let mut places = Vec::new();
        for _ in 0..20 {
            let rank = Rank::new(pool, comm, 100, 100);
            let layout = rank.exchange.layout().unwrap();
            let case = Case { destinations: vec![vec![1, 0]; 2], capacities: vec![200; 2] };
            rank.send(&case, &layout, false);
            rank.send_back(&case, &layout);
            places.push(layout.counts() as usize);
            drop((layout, rank));
            pool.commit().unwrap();
        }
        places.dedup();
        assert_eq!(places.len(), 1);
    });
}
