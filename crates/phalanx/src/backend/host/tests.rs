//! What happens at an instant that no trial of whole ranks can choose.

use super::tunables::KERNEL_COPY;
use super::*;
use crate::contract::Blocks;
use crate::contract::Direction;
use crate::control::endpoint::NewChannel;
use crate::control::failure;
use crate::control::layout::EMPTY;
use crate::control::world::World;
use crate::os::sync::Ordering;
use crate::os::{Process, SharedFile};
use crate::types::dtype::DType;
use chunks::Chunks;
use collective::trial::{AlgorithmTrial, Candidate, TrialChoice};
use proptest::prelude::*;
use std::sync::Arc;

/// Two ranks that take each other for processes.
fn pair() -> [HostComm; 2] {
    let processes = (0..2).map(|_| Process::current().unwrap()).collect();
    of_world(World::processes("job", SharedFile::create().unwrap(), processes, 2).unwrap())
}

fn pair_of_threads() -> [HostComm; 2] {
    of_world(World::threads().unwrap())
}

fn of_world(world: World) -> [HostComm; 2] {
    let world = Arc::new(world);
    let made = NewChannel::create(&world, 2).unwrap();
    [0, 1].map(|rank| {
        let channel = NewChannel::open(&world, made.id()).unwrap();
        HostComm::new(Endpoint::attach(world.clone(), channel, rank, vec![0, 1], Duration::from_secs(60)))
    })
}

#[test]
fn what_was_read_while_a_peer_gave_up_does_not_count() {
    let [reader, owner] = pair();
    assert!(reader.endpoint.inside(0, || ()).is_ok());
    assert!(reader.endpoint.inside(0, || owner.abort()).is_err());
}

#[test]
fn a_message_is_not_received_into_a_buffer_whose_operation_a_panic_has_left() {
    let [receiver, sender] = pair_of_threads();
    let (mut buffer, message) = ([7u8; 8], [1u8; 8]);
    let receive = Transfer::host(Direction::Recv(buffer.as_mut_ptr()), 1, 0, DType::U8, 8);
    let send = Transfer::host(Direction::Send(message.as_ptr()), 0, 0, DType::U8, 8);
    // SAFETY: both buffers outlive the communicator.
    unsafe {
        receiver.post(receive).unwrap();
        let sent = sender.post(send).unwrap();
        sender.wait(sent, &|| ()).unwrap();
    }
    receiver.abandon();
    // As the thread does that advances requests.
    assert!(receiver.progress().is_err());
    assert_eq!(buffer, [7; 8], "written after the buffer's frame may be gone");
    let error = sender.check().unwrap_err().to_string();
    assert!(error.contains("rank 0 is gone: its thread panicked"), "{error}");
}

/// What two thread ranks answer that make these calls, whose fingerprints are equal.
fn with_equal_fingerprints(calls: [Call<'_>; 2]) -> [Result<()>; 2] {
    let ranks = pair_of_threads();
    let run = |rank: &HostComm, call: &Call<'_>| {
        // SAFETY: one thread at a time has the state.
        unsafe { (*rank.state.get()).equal_fingerprints = true };
        // SAFETY: the buffers are as long as the call says, and outlive the communicator.
        unsafe { rank.recorded_collective(call, &|| ()) }
    };
    let (ranks, [first, second]) = (&ranks, calls.map(SentCall));
    std::thread::scope(|scope| {
        [
            scope.spawn(move || run(&ranks[0], &first.get())),
            scope.spawn(move || run(&ranks[1], &second.get())),
        ]
        .map(|thread| thread.join().unwrap())
    })
}

/// A call that goes to the thread of its rank.
struct SentCall<'a>(Call<'a>);

impl<'a> SentCall<'a> {
    fn get(&self) -> Call<'a> {
        self.0
    }
}

// SAFETY: the buffers outlive the thread, which alone uses them.
unsafe impl Send for SentCall<'_> {}

#[test]
fn lists_of_counts_with_one_fingerprint_let_nobody_read_past_a_buffer() {
    for operation in [Operation::AllGatherV, Operation::GatherV, Operation::ReduceScatterV] {
        // Rank 1 gives 128 KiB, where rank 0 takes it to give 256 KiB; or 384 KiB in all, where 256 KiB are expected.
        let lists = match operation {
            Operation::ReduceScatterV => [[128 << 10, 256 << 10], [128 << 10, 128 << 10]],
            _ => [[128 << 10, 256 << 10], [256 << 10, 128 << 10]],
        };
        let mut memory = [(); 2].map(|()| (vec![1u8; 512 << 10], vec![0u8; 512 << 10]));
        let mut rank = 0;
        let calls = memory.each_mut().map(|(send, recv)| {
            let blocks = Blocks::Each(&lists[rank]);
            rank += 1;
            let (send, recv) = (send.as_ptr(), recv.as_mut_ptr());
            Call { blocks, recv_blocks: blocks, send, recv, ..Call::empty(operation) }
        });
        let [error, _] = with_equal_fingerprints(calls);
        let error = error.expect_err(operation.name());
        assert!(matches!(error, Error::Mismatch(_)), "{error}");
    }
}

#[test]
fn the_data_of_a_short_call_is_not_taken_for_the_address_of_a_long_one() {
    let (secret, mut target) = (vec![42u8; 256 << 10], vec![0u8; 256 << 10]);
    // As if rank 0 showed the secret to its peers.
    let forged = [u64::MAX, secret.as_ptr() as u64];
    let short = Call {
        blocks: Blocks::Equal(size_of_val(&forged)),
        send: forged.as_ptr().cast(),
        recv: forged.as_ptr().cast_mut().cast(),
        ..Call::empty(Operation::Broadcast)
    };
    let long = Call {
        blocks: Blocks::Equal(target.len()),
        recv: target.as_mut_ptr(),
        ..Call::empty(Operation::Broadcast)
    };
    let [_, error] = with_equal_fingerprints([short, long]);
    assert!(matches!(error.unwrap_err(), Error::Mismatch(_)));
    assert!(!target.contains(&42));
}

#[test]
fn a_panic_inside_a_gate_leaves_it() {
    let [reader, owner] = pair_of_threads();
    let work = std::panic::AssertUnwindSafe(|| reader.endpoint.inside(0, || panic!("while it reads")));
    assert!(std::panic::catch_unwind(work).is_err());
    // Waits for all who are inside.
    owner.abort();
}

#[test]
fn nothing_is_sent_behind_a_message_that_was_given_up() {
    let [sender, _receiver] = pair();
    // More than there are chunks for.
    let message = vec![1u8; 4 << 20];
    let transfer = Transfer::host(Direction::Send(message.as_ptr()), 1, 0, DType::U8, message.len());
    // SAFETY: the message outlives the communicator.
    let [first, _second] = [0, 1].map(|_| unsafe { sender.post(transfer) }.unwrap());
    assert!(sender.progress().unwrap());
    sender.set_timeout(Duration::from_millis(1));
    assert!(sender.wait(first, &|| ()).unwrap_err().is_fatal());

    let moved = sender.messages.moved();
    assert!(moved > 0);
    for number in 1..=8 {
        sender.endpoint.channel.mail_word(1, 0, EMPTY, number).put(number, number as u16);
    }
    sender.progress().unwrap();
    assert_eq!(sender.messages.moved(), moved);
}

/// What one of two ranks does: fills so many chunks for the other, or empties so many.
#[derive(Debug, Clone, Copy)]
enum Step {
    Fill(usize, usize),
    Empty(usize, usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (any::<bool>(), 0..2usize, 1..200usize).prop_map(|(fills, rank, count)| match fills {
        true => Step::Fill(rank, count),
        false => Step::Empty(rank, count),
    });
    prop::collection::vec(step, 0..60)
}

proptest! {
    /// Whatever two ranks do, every chunk is one's, and once both have emptied what has come both have chunks to fill.
    #[test]
    fn chunks_change_hands_and_are_not_lost(steps in steps()) {
        let comms = pair();
        let channel = &comms[0].endpoint.channel;
        let count = channel.layout.mail_chunks;
        let mut ranks = [0, 1].map(|rank| Chunks::new(rank, 1 - rank, count));
        let everything = [Step::Empty(0, count), Step::Empty(1, count)];
        for step in steps.into_iter().chain(everything) {
            match step {
                Step::Fill(rank, most) => for _ in 0..most {
                    let Some(chunk) = ranks[rank].take(channel) else { break };
                    ranks[rank].give(channel, chunk);
                },
                Step::Empty(rank, most) => for _ in 0..most {
                    let Some(chunk) = ranks[rank].full(channel) else { break };
                    ranks[rank].keep(channel, chunk);
                },
            }
        }
        let had = ranks.each_mut().map(|chunks| {
            std::iter::from_fn(|| chunks.take(channel)).collect::<Vec<u16>>()
        });
        prop_assert!(had.iter().all(|had| had.len() >= count / 4), "{} and {}", had[0].len(), had[1].len());
        let mut all = had.concat();
        all.sort_unstable();
        prop_assert_eq!(all, (0..count as u16).collect::<Vec<u16>>());
    }
}

fn sent(message: &[u8]) -> Transfer {
    Transfer::host(Direction::Send(message.as_ptr()), 1, 0, DType::U8, message.len())
}

fn received(message: &mut [u8]) -> Transfer {
    Transfer::host(Direction::Recv(message.as_mut_ptr()), 0, 0, DType::U8, message.len())
}

#[test]
fn a_receive_that_was_given_up_leaves_its_message_to_no_other() {
    let [sender, receiver] = pair();
    let (message, mut short, mut right) = ([1u8; 8], [0u8; 4], [0u8; 8]);
    // SAFETY: the messages are used by nobody else until both have been waited for.
    let [first, second] =
        unsafe { [receiver.post(received(&mut short)), receiver.post(received(&mut right))] };
    // SAFETY: as above.
    unsafe { sender.recorded_transfer(sent(&message), &|| ()) }.unwrap();
    for id in [first, second] {
        let error = receiver.wait(id.unwrap(), &|| ()).unwrap_err();
        assert!(matches!(error, Error::Mismatch(_)), "{error}");
    }
    assert_eq!(right, [0; 8]);
}

#[test]
fn a_wait_for_a_message_is_for_its_peer_and_has_its_number() {
    let world = Arc::new(World::threads().unwrap());
    let made = NewChannel::create(&world, 3).unwrap();
    let [rank, _other, _awaited] = [0, 1, 2].map(|rank| {
        let channel = NewChannel::open(&world, made.id()).unwrap();
        HostComm::new(Endpoint::attach(world.clone(), channel, rank, vec![0, 1, 2], Duration::from_millis(1)))
    });
    let mut words = [[0u8; 1]; 3];
    let [other, before, awaited] = &mut words;
    let from = |peer: usize, word: &mut [u8; 1]| Transfer { peer, ..received(word) };
    // SAFETY: the words are used by nobody else until the communicator is gone.
    let posted = unsafe {
        [(1, other), (2, before), (2, awaited)].map(|(peer, word)| rank.post(from(peer, word)).unwrap())
    };
    let Err(Error::Timeout(timeout)) = rank.wait(posted[2], &|| ()) else { panic!("nobody sends") };
    let missing: Vec<usize> = timeout.missing.iter().map(|missing| missing.rank).collect();
    assert_eq!((missing, timeout.sequence), (vec![2], 2));
}

#[test]
fn a_copy_of_a_rank_takes_no_message() {
    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(status: i32) -> !;
    }
    let [sender, receiver] = pair();
    let (message, mut target) = ([7u8; 3], [0u8; 3]);
    // SAFETY: the messages are used by nobody else until it has been waited for.
    let id = unsafe { receiver.post(received(&mut target)) }.unwrap();
    // SAFETY: as above.
    unsafe { sender.recorded_transfer(sent(&message), &|| ()) }.unwrap();
    // SAFETY: the copy asks for what it is refused, and ends.
    let child = unsafe { fork() };
    if child == 0 {
        let refused = |outcome: Result<bool>| matches!(outcome, Err(Error::Unsupported(_)));
        let all = refused(receiver.progress())
            && refused(receiver.test(id))
            && refused(receiver.wait(id, &|| ()).map(|()| true));
        // SAFETY: always sound.
        unsafe { _exit(i32::from(!all)) };
    }
    let mut status = -1;
    // SAFETY: the child is this process's, and the status is written.
    assert_eq!(unsafe { waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the copy is refused everything");
    receiver.wait(id, &|| ()).unwrap();
    assert_eq!(target, message);
}

#[test]
fn threads_of_a_rank_that_fail_at_once_have_one_verdict() {
    for _ in 0..3000 {
        let [rank, peer] = pair_of_threads();
        let context = failure::FailureContext::of_last(rank.endpoint.own(), 0);
        let verdicts = [
            failure::ChannelFailure::Aborted { rank: 0 },
            failure::ChannelFailure::Timeout { missing: vec![1], context },
        ];
        let come = std::sync::atomic::AtomicUsize::new(0);
        let fail = |failure: &failure::ChannelFailure| {
            come.fetch_add(1, Ordering::Relaxed);
            while come.load(Ordering::Relaxed) < 2 {
                std::hint::spin_loop();
            }
            rank.endpoint.fail(failure).to_string()
        };
        let told: Vec<String> = std::thread::scope(|scope| {
            let threads = verdicts.each_ref().map(|verdict| scope.spawn(|| fail(verdict)));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let later = peer.endpoint.check().unwrap_err().to_string();
        assert!(told.iter().all(|told| *told == later), "{told:?}, later {later}");
    }
}

/// So many rounds of `work` with two ranks.
fn rounds_of(
    ranks: [HostComm; 2],
    rounds: u32,
    work: impl Fn(&HostComm, u32) + Copy + Send + 'static,
) -> [HostComm; 2] {
    let threads = ranks.map(|comm| {
        std::thread::spawn(move || {
            (1..=rounds).for_each(|round| work(&comm, round));
            comm
        })
    });
    threads.map(|thread| thread.join().unwrap())
}

/// An operation whose blocks have `count` elements each.
fn blocks_of(operation: Operation, send: &[u32], recv: &mut [u32], count: usize) -> Call<'static> {
    Call {
        send: send.as_ptr().cast(),
        recv: recv.as_mut_ptr().cast(),
        dtype: DType::U32,
        blocks: Blocks::Equal(count),
        recv_blocks: Blocks::Equal(count),
        ..Call::empty(operation)
    }
}

/// Looks at the trial of kernel copy of a rank that has nothing under way.
fn kernel_copies<T>(rank: &HostComm, look: impl FnOnce(&mut AlgorithmTrial) -> T) -> T {
    // SAFETY: no operation is under way, and the reference ends here.
    look(unsafe { &mut *rank.state.get() }.kernel_copies())
}

/// All_to_alls of two ranks: through the region, or by kernel copy where that works.
fn exchanges(ranks: [HostComm; 2], count: usize, rounds: u32) -> [HostComm; 2] {
    rounds_of(ranks, rounds, move |comm, round| {
        let rank = comm.rank() as u32;
        let send: Vec<u32> = (0..2 * count as u32).map(|i| i ^ (rank << 30) ^ (round << 24)).collect();
        let mut recv = vec![0u32; 2 * count];
        let call = blocks_of(Operation::AllToAll, &send, &mut recv, count);
        // SAFETY: the buffers have two blocks each, and one thread drives the rank.
        unsafe { comm.collective(&call) }.unwrap();
        let expected = (0..2u32).flat_map(|from| {
            (0..count as u32).map(move |i| (rank * count as u32 + i) ^ (from << 30) ^ (round << 24))
        });
        assert!(expected.eq(recv.iter().copied()), "round {round} of rank {rank}");
    })
}

#[test]
fn the_kernel_copies_long_blocks_once_all_ranks_can() {
    let long = KERNEL_COPY / 4;
    let [short_blocks, _peer] = exchanges(pair(), long - 1, 15);
    assert!(!short_blocks.endpoint.has_probed_kernel_copy());

    let [comm, peer] = exchanges(pair(), long, 15);
    let can = |rank: &HostComm| rank.endpoint.can_all_kernel_copy();
    assert!(can(&comm) && can(&peer), "a process can read its own memory");
    for rank in [&comm, &peer] {
        assert!(kernel_copies(rank, |trial| trial.has_tried_other()));
    }
    let memory = [1u8; 10];
    assert!(comm.endpoint.is_kernel_copyable(memory.as_ptr(), memory.len()));
    // Memory that the kernel cannot read, such as a device's.
    assert!(!comm.endpoint.is_kernel_copyable(16 as *const u8, 10));
    let mut got = [0u8; 10];
    // SAFETY: as many bytes.
    unsafe { comm.endpoint.kernel_copy(1, memory.as_ptr() as u64, got.as_mut_ptr(), 10) }.unwrap();
    assert_eq!(got, [1; 10]);
    // SAFETY: as above.
    let refused = unsafe { comm.endpoint.kernel_copy(1, 16, got.as_mut_ptr(), 10) }.unwrap_err();
    assert!(refused.to_string().contains("rank 1"), "{refused}");
}

#[test]
fn blocks_are_offered_no_longer_where_the_region_is_faster() {
    const BLOCK: usize = KERNEL_COPY;
    let (region, kernel) = (Candidate::Usual, Candidate::Other);
    let next = |ranks: &[HostComm; 2]| kernel_copies(&ranks[0], |trial| trial.next());
    let passes = |ranks: &[HostComm; 2]| next(ranks) == TrialChoice::Keep(region);
    let are_left =
        |ranks: &[HostComm; 2]| ranks.each_ref().map(|rank| kernel_copies(rank, |trial| trial.keeps_usual()));

    // Whichever is faster here, both ranks act by it, and longer blocks begin no trial of their own.
    let mut ranks = exchanges(pair(), BLOCK / 4, 40);
    let chosen = passes(&ranks);
    for block in [BLOCK, 4 * BLOCK] {
        ranks = exchanges(ranks, block / 4, 2);
        assert_eq!((passes(&ranks), are_left(&ranks)), (chosen, [chosen; 2]), "{block} bytes");
    }

    // As if rank 0 had measured that one of them takes half the time.
    for faster in [region, kernel] {
        let mut ranks = pair();
        while let TrialChoice::Try(candidate) = next(&ranks) {
            let micros = if candidate == faster { 1 } else { 2 };
            kernel_copies(&ranks[0], |trial| trial.took(BLOCK, candidate, Duration::from_micros(micros)));
        }
        ranks = exchanges(ranks, 2 * BLOCK / 4, 3);
        assert_eq!(are_left(&ranks), [faster == region; 2]);
        // Where the region is kept, rank 1 does not even probe kernel copy; else it has used it.
        assert_eq!(ranks[1].endpoint.has_probed_kernel_copy(), faster == kernel);
        assert_eq!(kernel_copies(&ranks[1], |trial| trial.has_tried_other()), faster == kernel);
    }
}

#[test]
fn blocks_of_a_peer_that_cannot_be_read_go_through_the_region() {
    let ranks = pair();
    // As if it were in a container with processes of its own.
    ranks[1].endpoint.own().life.pid.store(u32::MAX >> 1, Ordering::Relaxed);
    let [comm, peer] = exchanges(ranks, KERNEL_COPY / 4, 15);
    assert!(comm.endpoint.has_probed_kernel_copy() && !comm.endpoint.can_all_kernel_copy());
    assert!(!peer.endpoint.can_all_kernel_copy());
}

#[test]
fn long_all_reduces_are_pushed_through_the_caches_and_past_them() {
    // Not whole lines for each rank, nor blocks of the arithmetic.
    let count = (1 << 20) / 4 + 77;
    let ranks = rounds_of(pair_of_threads(), 40, move |comm, round| {
        let send: Vec<u32> = (0..count as u32).map(|i| i ^ (round << 20) ^ (comm.rank() as u32)).collect();
        let mut recv = vec![0u32; count];
        let call = blocks_of(Operation::AllReduce, &send, &mut recv, count);
        // SAFETY: the buffers are as long, and one thread drives the rank.
        unsafe { comm.collective(&call) }.unwrap();
        let expected = send.iter().map(|x| x.wrapping_add(x ^ 1));
        assert!(expected.eq(recv.iter().copied()), "round {round} of rank {}", comm.rank());
    });
    for rank in &ranks {
        // SAFETY: nothing is under way.
        assert!(unsafe { &mut *rank.state.get() }.pushes().has_tried_other());
    }
}
