// long_cable NAMESPACE_A ADDRESS_A NAMESPACE_B ADDRESS_B DELAY_US RATE_MBIT
//
// A cable between two network namespaces: a packet arrives DELAY_US after it has left, and RATE_MBIT bounds each
// direction. Each end is a TUN device, "wan0"; the program carries packets between the two, and prints "up" first.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MTU 65000
#define QUEUED (1 << 16) // packets under way in one direction, at most
#define TURN 32          // packets taken from one end before the other has its turn

typedef struct {
    char *data;
    int size;
    double due; // when it arrives
} Packet;

typedef struct {
    Packet packets[QUEUED];
    long head, tail;
    double free_at; // when the last packet has left
} Direction;

static Direction directions[2];
static char *spare[2 * QUEUED];
static long num_spare;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int open_end(const char *namespace, const char *address) {
    char text[400];
    snprintf(text, sizeof text, "/var/run/netns/%s", namespace);
    int file = open(text, O_RDONLY);
    if (file < 0 || setns(file, CLONE_NEWNET)) fail(text);
    close(file);
    int end = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strcpy(request.ifr_name, "wan0");
    if (end < 0 || ioctl(end, TUNSETIFF, &request)) fail("/dev/net/tun");
    snprintf(text, sizeof text, "ip addr add %s/24 dev wan0 && ip link set wan0 mtu %d txqueuelen 10000 up", address, MTU);
    if (system(text)) exit(1);
    return end;
}

// Takes what has left one end; whether that was anything.
static int take(int end, Direction *direction, double delay, double bytes_a_second) {
    int count = 0;
    while (count < TURN && direction->tail - direction->head < QUEUED) {
        char *data = num_spare ? spare[--num_spare] : malloc(MTU + 100);
        int size = data ? read(end, data, MTU + 100) : 0;
        if (size <= 0) {
            if (data) spare[num_spare++] = data;
            break;
        }
        double time = now();
        direction->free_at = (time > direction->free_at ? time : direction->free_at) + size / bytes_a_second;
        direction->packets[direction->tail++ % QUEUED] = (Packet){data, size, direction->free_at + delay};
        count++;
    }
    return count;
}

// Delivers what is due; returns when the next packet is, or a second from now.
static double deliver(int end, Direction *direction) {
    double time = now();
    while (direction->head < direction->tail) {
        Packet *packet = &direction->packets[direction->head % QUEUED];
        if (packet->due > time) return packet->due;
        if (write(end, packet->data, packet->size) < 0) {} // a full queue loses packets, as a cable does
        spare[num_spare++] = packet->data;
        direction->head++;
    }
    return time + 1;
}

int main(int count, char **words) {
    if (count != 7) return 2;
    prctl(PR_SET_TIMERSLACK, 1000);
    prctl(PR_SET_PDEATHSIG, 9);
    int ends[2] = {open_end(words[1], words[2]), open_end(words[3], words[4])};
    double delay = atof(words[5]) * 1e-6, rate = atof(words[6]) * 1e6 / 8;
    puts("up");
    fflush(stdout);
    for (;;) {
        int taken = take(ends[0], &directions[0], delay, rate) + take(ends[1], &directions[1], delay, rate);
        double first = deliver(ends[1], &directions[0]), other = deliver(ends[0], &directions[1]);
        double left = (first < other ? first : other) - now();
        if (taken || left <= 0) continue;
        struct pollfd polled[2] = {{ends[0], POLLIN, 0}, {ends[1], POLLIN, 0}};
        struct timespec limit = {(long)left, (long)((left - (long)left) * 1e9)};
        ppoll(polled, 2, &limit, NULL);
    }
}
